/// \file
/// augmentation: a random shift and mirroring of images, the same for a sample on whichever rank it is loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/random.hpp>

namespace ddp {

/// How images are changed at random each time they are loaded. The changes depend on seed, epoch and sample: they are the
/// same for any number of ranks.
struct augmentation {
    /// Pixels of zero bytes that are added on each side, before a random part of the original size is cut out.
    std::size_t crop_padding = 0;
    bool flip = false;       ///< mirrors each image left to right with probability 1/2
    std::uint64_t seed = 0;  ///< of the random numbers
    friend bool operator==(augmentation const&, augmentation const&) = default;
};

/// How one sample is changed.
struct augmentation_draw {
    std::size_t down = 0;   ///< first row of the cut in the padded image; crop_padding: no shift
    std::size_t right = 0;  ///< first column of the cut, likewise
    bool flip = false;      ///< whether the cut is mirrored left to right
    friend bool operator==(augmentation_draw, augmentation_draw) = default;
};

/// How a sample is changed in an epoch, from one block of random bits: word 0 gives the row, word 1 the column (each
/// uniform up to 2^-32 times the number of positions), and the lowest bit of word 2 says whether it is mirrored. The same
/// distribution as torchvision's RandomCrop with padding, followed by RandomHorizontalFlip.
[[nodiscard]] constexpr augmentation_draw draw_augmentation(augmentation const& how, std::uint64_t epoch,
                                                            std::uint32_t sample) {
    auto const words = random_stream(how.seed, random_use::augmentation, epoch).at(sample).words();
    std::uint64_t const places = 2 * std::uint64_t{how.crop_padding} + 1;
    return {static_cast<std::size_t>(words[0] * places >> 32), static_cast<std::size_t>(words[1] * places >> 32),
            how.flip && (words[2] & 1) != 0};
}

}  // namespace ddp
