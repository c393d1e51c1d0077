/// \file
/// What rendezvous/slurm_node_list.hpp declares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <ddp/rendezvous/slurm_node_list.hpp>

namespace ddp::detail {

/// The unread rest of a text.
class slurm_text {
public:
    static constexpr std::uint64_t most = 1'000'000;

    explicit slurm_text(std::string_view text) : left_(text) {}

    [[nodiscard]] bool empty() const noexcept { return left_.empty(); }
    [[nodiscard]] char next() const noexcept { return left_.empty() ? '\0' : left_.front(); }
    [[nodiscard]] bool take(char wanted) noexcept {
        if (next() != wanted || left_.empty()) return false;
        left_.remove_prefix(1);
        return true;
    }
    [[nodiscard]] bool take(std::string_view wanted) noexcept {
        if (!left_.starts_with(wanted)) return false;
        left_.remove_prefix(wanted.size());
        return true;
    }
    /// One to nine digits; nothing otherwise.
    [[nodiscard]] std::string_view digits() noexcept {
        std::size_t n = 0;
        while (n < left_.size() && is_digit(left_[n])) ++n;
        if (n > 9) return {};
        std::string_view const taken = left_.substr(0, n);
        left_.remove_prefix(n);
        return taken;
    }
    /// Reads characters of a host's name.
    [[nodiscard]] std::string_view name() noexcept {
        std::size_t n = 0;
        while (n < left_.size() && is_name(left_[n])) ++n;
        std::string_view const taken = left_.substr(0, n);
        left_.remove_prefix(n);
        return taken;
    }
    [[nodiscard]] static std::uint64_t value(std::string_view digits) noexcept {
        std::uint64_t number = 0;
        for (char const c : digits) number = number * 10 + static_cast<std::uint64_t>(c - '0');
        return number;
    }

private:
    [[nodiscard]] static bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }
    [[nodiscard]] static bool is_name(char c) noexcept {
        return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_' || c == '.';
    }
    std::string_view left_;
};

/// The rest of "[01-03,07]" after its bracket: how many numbers, and the first as it is written. 0: malformed.
[[gnu::cold]] DDP_DECL std::uint64_t slurm_ranges(slurm_text& text, std::string& first) {
    std::uint64_t count = 0;
    bool is_first = true;
    do {
        std::string_view const low = text.digits();
        std::string_view const high = text.take('-') ? text.digits() : low;
        // [8-12] grows in width, [08-12] has it; [012-13] has none.
        if (low.empty() || high.size() < low.size() || slurm_text::value(high) < slurm_text::value(low)) return 0;
        count += slurm_text::value(high) - slurm_text::value(low) + 1;
        if (count > slurm_text::most) return 0;
        if (is_first) first += low;
        is_first = false;
    } while (text.take(','));
    return text.take(']') ? count : 0;
}

[[gnu::cold]] DDP_DECL std::optional<slurm_node_list> slurm_node_list::parse(std::string_view text) {
    if (text.size() > 65536) return std::nullopt;
    slurm_text left(text);
    slurm_node_list list;
    std::uint64_t total = 0;
    do {
        std::string first;
        std::uint64_t count = 1;
        for (;;) {
            std::string_view const plain = left.name();
            first += plain;
            if (left.take('[')) {
                count *= slurm_ranges(left, first);
                if (count == 0 || count > slurm_text::most) return std::nullopt;
            } else if (plain.empty()) {
                break;
            }
        }
        if (first.empty() || first.size() > 253 || first.front() == '-') return std::nullopt;
        total += count;
        if (total > slurm_text::most) return std::nullopt;
        if (list.first.empty()) list.first = first;
    } while (left.take(','));
    if (!left.empty()) return std::nullopt;
    list.count = static_cast<std::uint32_t>(total);
    return list;
}

[[gnu::cold]] DDP_DECL std::optional<slurm_task_counts> slurm_task_counts::parse(std::string_view text,
                                                                                 std::uint32_t node) {
    if (text.size() > 65536) return std::nullopt;
    slurm_text left(text);
    std::uint64_t tasks = 0, nodes = 0, here = 0;
    do {
        std::uint64_t const each = slurm_text::value(left.digits());
        std::uint64_t times = 1;
        if (left.take("(x")) {
            times = slurm_text::value(left.digits());
            if (!left.take(')')) return std::nullopt;
        }
        if (each == 0 || times == 0) return std::nullopt;
        if (node >= nodes && node < nodes + times) here = each;
        nodes += times;
        tasks += each * times;
        if (tasks > slurm_text::most) return std::nullopt;
    } while (left.take(','));
    if (!left.empty() || here == 0) return std::nullopt;
    return slurm_task_counts{static_cast<std::uint32_t>(here), static_cast<std::uint32_t>(tasks),
                             static_cast<std::uint32_t>(nodes)};
}

}  // namespace ddp::detail
