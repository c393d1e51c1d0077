/// \file
/// What core/digest.hpp declares.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include <ddp/core/digest.hpp>

namespace ddp {

DDP_DECL digest& digest::add(const_bytes bytes) noexcept {
    // Four variables, not an array: GCC would keep that in memory, and run at half the speed.
    std::uint64_t a = state_ ^ 0x9e3779b97f4a7c15u, b = state_ + 0xbf58476d1ce4e5b9u;
    std::uint64_t c = state_ ^ 0x94d049bb133111ebu, d = state_ - 0xd6e8feb86659fd93u;
    std::size_t at = 0;
    for (; at + 32 <= bytes.size(); at += 32) {
        a = step(a, load(bytes.data() + at, 8));
        b = step(b, load(bytes.data() + at + 8, 8));
        c = step(c, load(bytes.data() + at + 16, 8));
        d = step(d, load(bytes.data() + at + 24, 8));
    }
    std::uint64_t lane[4] = {a, b, c, d};
    for (std::size_t l = 0; at < bytes.size(); at += 8, ++l)
        lane[l & 3] = step(lane[l & 3], load(bytes.data() + at, bytes.size() - at < 8 ? bytes.size() - at : 8));
    std::uint64_t all = bytes.size();
    for (std::uint64_t const l : lane) all = step(all, mix(l));
    state_ = mix(all);
    return *this;
}

[[gnu::cold]] DDP_DECL std::string policy_words(std::string_view name, std::initializer_list<named_setting> settings) {
    std::string text(name);
    for (named_setting const& s : settings) text += detail::concat({&s == settings.begin() ? "(" : ", ", s.text});
    return settings.size() == 0 ? text : text + ")";
}

}  // namespace ddp
