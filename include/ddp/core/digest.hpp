/// \file
/// A 64-bit digest of bytes: says whether two ranks hold the same, not who tampered (it is no cryptographic hash).
#pragma once

#include <ddp/core/language.hpp>  // first

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <ddp/core/bytes.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>

namespace ddp {

/// Order-sensitive digest, fed piece by piece. Equal sequences of add() calls give equal values on all platforms with
/// the same byte order. Four lanes of rounds as in XXH64 (Collet) over 8-byte words, mixed at the end as in SplitMix64
/// (Steele, Lea and Flood, OOPSLA 2014). Cost: 2 to 6 bytes per cycle, depending on the compiler; allocates nothing.
class digest {
public:
    digest& add(const_bytes bytes) noexcept;
    digest& add(std::uint64_t value) noexcept { return add(bytes_of(value)); }
    digest& add(std::string_view text) noexcept { return add(as_const_bytes(std::span<char const>(text))); }
    template <class T>
    digest& add(std::span<T const> values) noexcept {
        return add(as_const_bytes(values));
    }

    [[nodiscard]] std::uint64_t value() const noexcept { return state_; }

private:
    static std::uint64_t load(std::byte const* from, std::size_t count) noexcept {
        std::uint64_t word = 0;
        std::memcpy(&word, from, count);
        return word;
    }
    static std::uint64_t step(std::uint64_t lane, std::uint64_t word) noexcept {
        // The word is multiplied before it meets the lane: otherwise its top bit stays one bit, which a single flipped
        // bit of the lane's next word undoes.
        return std::rotl(lane + word * 0xc2b2ae3d27d4eb4fu, 31) * 0x9e3779b185ebca87u;
    }
    friend class quick_digest;
    static std::uint64_t mix(std::uint64_t z) noexcept {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

    std::uint64_t state_ = 0x243f6a8885a308d3u;
};

/// The digest of a few words, for what is computed in every call: 1 to 2 ns a word, where a digest takes 20. Its values are
/// compared between ranks of a job, and never kept. Each word is added by one multiplication, and the sum mixed as above.
class quick_digest {
public:
    quick_digest& add(std::uint64_t word) noexcept {
        state_ = (std::rotl(state_, 29) ^ word) * 0x9e3779b185ebca87u;
        state_ ^= state_ >> 32;
        return *this;
    }
    /// Also adds its length.
    quick_digest& add(std::string_view text) noexcept {
        std::size_t const size = text.size();
        for (; text.size() >= 8; text.remove_prefix(8)) {
            std::uint64_t word = 0;
            std::memcpy(&word, text.data(), 8);
            add(word);
        }
        std::uint64_t rest = size;
        for (char const c : text) rest = rest << 8 | static_cast<unsigned char>(c);
        return add(rest);
    }
    [[nodiscard]] std::uint64_t value() const noexcept { return digest::mix(state_); }

private:
    std::uint64_t state_ = 0x243f6a8885a308d3u;
};

/// The hash of an optimizer, an exchange, a layer or another policy, from its name and all its settings in order: numbers,
/// bools, enumerations, text. Ranks compare it, so that no two of them train with different settings.
///
///     std::uint64_t hash() const { return ddp::policy_hash("lion", lr, beta1, beta2, weight_decay); }
template <class... Settings>
    requires(((std::is_arithmetic_v<Settings> && !std::is_same_v<Settings, long double>) ||  // which has padding
              std::is_enum_v<Settings> || std::is_convertible_v<Settings const&, std::string_view>) &&
             ...)
[[nodiscard]] std::uint64_t policy_hash(std::string_view name, Settings const&... settings) noexcept {
    digest all;
    all.add(name);
    [[maybe_unused]] auto const add = [&all](auto const& value) {
        using value_type = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_convertible_v<value_type const&, std::string_view>)
            all.add(std::string_view(value)).add(std::uint64_t{std::string_view(value).size()});
        else if constexpr (std::is_floating_point_v<value_type>)
            all.add(bytes_of(value));
        else
            all.add(static_cast<std::uint64_t>(value));
    };
    (add(settings), ...);
    return all.value();
}

/// A setting in words. Made from its name and a number, a bool or text.
struct named_setting {
    named_setting(std::string_view what, double value) : text(detail::concat({what, " ", detail::decimal(value)})) {}
    named_setting(std::string_view what, std::string_view value) : text(detail::concat({what, " ", value})) {}
    template <std::unsigned_integral N>
    named_setting(std::string_view what, N value) : text(detail::concat({what, " "})) {
        if constexpr (std::is_same_v<N, bool>)
            text += value ? "true" : "false";
        else
            text += std::to_string(value);
    }
    std::string text;  ///< "lr 0.1"
};

/// A policy's settings, for the error when ranks differ: "lion(lr 0.1, beta1 0.9)". For a member hash_words() next to hash():
///
///     std::string hash_words() const { return ddp::policy_words("lion", {{"lr", lr}, {"beta1", beta1}}); }
[[nodiscard]] std::string policy_words(std::string_view name, std::initializer_list<named_setting> settings);

namespace detail {
/// The hash of settings that must be the same on all ranks; 0 if there are none.
template <class Thing>
[[nodiscard]] std::uint64_t hash_of(Thing const& thing) {
    if constexpr (requires { thing.hash(); }) return static_cast<std::uint64_t>(thing.hash());
    return 0;
}
/// Empty where it has no hash_words().
template <class Thing>
[[nodiscard]] std::string hash_words_of(Thing const& thing) {
    if constexpr (requires { thing.hash_words(); }) return thing.hash_words();
    return {};
}
}  // namespace detail

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/core/impl/digest.ipp>
#endif
