/// \file
/// Images as rows of activations, and how a square window walks over them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/text.hpp>

namespace ddp::nn {

/// The shape of an image, which is a row of channels * height * width numbers: plane after plane, each row by row
/// (PyTorch's NCHW).
struct image_shape {
    std::size_t channels = 1;  ///< planes: 1 in a grey image, 3 in a colour image
    std::size_t height = 1;    ///< pixels
    std::size_t width = 1;     ///< pixels

    [[nodiscard]] constexpr std::size_t plane() const noexcept { return height * width; }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return channels * height * width; }
    friend constexpr bool operator==(image_shape const&, image_shape const&) = default;
};

[[nodiscard]] inline std::string to_string(image_shape const& s) {
    return std::to_string(s.channels) + " x " + std::to_string(s.height) + " x " + std::to_string(s.width);
}

namespace detail {

/// kernel x kernel pixels, moved by `stride` over an image that has `padding` more pixels on each side.
struct window {
    image_shape in;
    std::size_t kernel, stride, padding;
    std::size_t out_height, out_width;

    window(char const* layer, image_shape over, std::size_t kernel_size, std::size_t step, std::size_t border)
        : in(over), kernel(kernel_size), stride(step), padding(border) {
        auto const name = [&] { return std::string(layer) + " over images of " + to_string(in) + ": "; };
        DDP_EXPECTS(in.size() > 0, name() + "give channels, height and width positive numbers");
        DDP_EXPECTS(kernel > 0 && stride > 0, name() + "kernel and stride are positive numbers of pixels");
        DDP_EXPECTS(padding < kernel, name() + "a padding of " + std::to_string(padding) + " lets windows of " +
                                          std::to_string(kernel) +
                                          " contain no pixel; make it smaller than the kernel");
        DDP_EXPECTS(std::min(in.height, in.width) + 2 * padding >= kernel,
                    name() + "a window of " + std::to_string(kernel) + " with a padding of " + std::to_string(padding) +
                        " does not fit; make the kernel smaller or the padding larger");
        out_height = (in.height + 2 * padding - kernel) / stride + 1;
        out_width = (in.width + 2 * padding - kernel) / stride + 1;
    }

    [[nodiscard]] std::size_t out_plane() const noexcept { return out_height * out_width; }
    [[nodiscard]] std::uint64_t hash(char const* layer) const noexcept {
        return policy_hash(layer, in.channels, in.height, in.width, kernel, stride, padding);
    }
    [[nodiscard]] std::string hash_words(char const* layer) const {
        return ddp::detail::concat({layer, "(images of ", to_string(in), ", kernel ", kernel, ", stride ", stride,
                                    ", padding ", padding, ")"});
    }

    /// Half-open range of positions.
    struct range {
        std::size_t begin, end;
        [[nodiscard]] std::size_t size() const noexcept { return end - begin; }
    };
    /// The window positions o in [0, count) at which the window's pixel k is inside an image of `extent` pixels.
    [[nodiscard]] range reach(std::size_t k, std::size_t extent, std::size_t count) const noexcept {
        std::size_t const begin = k >= padding ? 0 : (padding - k + stride - 1) / stride;
        std::size_t const end = k >= extent + padding ? 0 : std::min(count, (extent + padding - k - 1) / stride + 1);
        return {std::min(begin, end), end};
    }
    /// The image's pixels that the window at position o covers.
    [[nodiscard]] range covers(std::size_t o, std::size_t extent) const noexcept {
        std::size_t const first = o * stride;
        return {first < padding ? 0 : first - padding, std::min(extent, first + kernel - padding)};
    }
};

/// Throws usage_error unless samples are such images.
inline void expect_images(char const* layer, image_shape const& in, std::size_t columns) {
    DDP_EXPECTS(columns == in.size(), std::string(layer) + " over images of " + to_string(in) +
                                          " was given samples of " + std::to_string(columns) +
                                          " features: they must be " + std::to_string(in.size()) +
                                          ", plane after plane");
}

}  // namespace detail

}  // namespace ddp::nn
