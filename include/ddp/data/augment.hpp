/// \file
/// augmentation: a random shift and a mirror image of a picture, the same for a sample whoever loads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/random.hpp>

namespace ddp {

/// How pictures are changed each time they are looked at. Drawn by seed, epoch and sample: the same for any number of ranks.
struct augmentation {
    std::size_t crop_padding =
        0;                   ///< pixels of zero bytes on each side, out of which the picture's size is cut anywhere
    bool flip = false;       ///< every second picture, by chance, is mirrored left to right
    std::uint64_t seed = 0;  ///< of the draws
    friend bool operator==(augmentation const&, augmentation const&) = default;
};

/// What becomes of one sample.
struct augmentation_draw {
    std::size_t down = 0;   ///< the cut's first row in the padded picture; crop_padding is where the picture was
    std::size_t right = 0;  ///< its first column
    bool flip = false;      ///< the cut is mirrored
    friend bool operator==(augmentation_draw, augmentation_draw) = default;
};

/// Of a sample in an epoch, from one block of random bits: word 0 the row, word 1 the column (uniform to 2^-32 times the number
/// of places), the lowest bit of word 2 the flip. As torchvision's RandomCrop(padding = …), then RandomHorizontalFlip.
[[nodiscard]] constexpr augmentation_draw draw_augmentation(augmentation const& how, std::uint64_t epoch,
                                                            std::uint32_t sample) {
    auto const words = random_stream(how.seed, random_use::augmentation, epoch).at(sample).words();
    std::uint64_t const places = 2 * std::uint64_t{how.crop_padding} + 1;
    return {static_cast<std::size_t>(words[0] * places >> 32), static_cast<std::size_t>(words[1] * places >> 32),
            how.flip && (words[2] & 1) != 0};
}

}  // namespace ddp
