/// \file
/// local_frozen: which parameters a rank of a local_parallel leaves unchanged.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/frozen.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/replica.hpp>

namespace ddp::detail {

/// Those of local_options::frozen are frozen permanently: they have no optimizer state, lie behind the others in the
/// arena, and take no part in meetings. Others can be frozen and unfrozen.
template <Element E>
class local_frozen {
public:
    local_frozen(std::span<parameter<E> const> parameters, std::vector<std::string> const& patterns)
        : parameters_(parameters),
          from_the_start_(marks_of(parameters, patterns, "local_options.frozen")),
          now_(from_the_start_) {}

    /// By parameter: not 0 where it is frozen.
    [[nodiscard]] std::span<std::uint8_t const> now() const noexcept { return now_; }
    [[nodiscard]] std::span<std::uint8_t const> from_the_start() const noexcept { return from_the_start_; }

    /// The order of parameters in the arena.
    [[nodiscard]] std::vector<std::size_t> order() const {
        std::vector<std::size_t> all;
        for (bool const last : {false, true})
            for (std::size_t i = 0; i < from_the_start_.size(); ++i)
                if ((from_the_start_[i] != 0) == last) all.push_back(i);
        return all;
    }
    /// The layout of the parameters that are trained. `counts`: the elements of all parameters.
    [[nodiscard]] layout trained(std::vector<std::size_t> counts, parameter_placement placed) const {
        for (std::size_t i = 0; i < counts.size(); ++i)
            if (from_the_start_[i] != 0) counts[i] = 0;
        return layout(std::move(counts), order(), sizeof(E), placed);
    }

    /// now(), but with `mark` for every name that matches. Throws usage_error, which names `what`, if none does.
    [[nodiscard]] std::vector<std::uint8_t> marked(char const* what, std::string_view pattern,
                                                   std::uint8_t mark) const {
        std::vector<std::uint8_t> next = now_;
        DDP_EXPECTS(mark_fitting(parameters_, pattern, mark, next),
                    std::string(what) + ": no parameter's name matches '" + std::string(pattern) +
                        "'; '*' stands for any characters, '?' for one");
        return next;
    }
    void set(char const* what, std::span<std::uint8_t const> next) {
        DDP_EXPECTS(next.size() == now_.size(), std::string(what) + ": " + std::to_string(next.size()) + " marks for " +
                                                    std::to_string(now_.size()) + " parameters");
        for (std::size_t i = 0; i < next.size(); ++i)
            DDP_EXPECTS(next[i] != 0 || from_the_start_[i] == 0,
                        std::string(what) + ": '" + parameters_[i].name +
                            "' is one of local_options::frozen, which have no optimizer state and take no part in "
                            "meetings; leave it out there, and freeze() it when the trainer is made");
        std::ranges::transform(next, now_.begin(), [](std::uint8_t mark) -> std::uint8_t { return mark != 0 ? 1 : 0; });
    }
    /// A hash that is the same for equal marks.
    [[nodiscard]] static std::uint64_t hash_of(std::span<std::uint8_t const> marks) {
        digest all;
        for (std::uint8_t const mark : marks) all.add(mark != 0 ? "1" : "0");
        return all.value();
    }

    /// By parameter: 0 if it keeps its value in this step; empty: none does. Sets the gradients of frozen parameters to
    /// 0, for the norm.
    template <class M>
    [[nodiscard]] std::span<std::uint8_t const> to_be_stepped(replica<M>& of, unused how) {
        bool const all_used = how == unused::error;
        if (now_ == from_the_start_) return all_used ? std::span<std::uint8_t const>() : of.used();
        stepped_.assign(now_.size(), 1);
        for (std::size_t i = 0; i < now_.size(); ++i) {
            if (now_[i] != 0) std::ranges::fill(of.memory().gradient(i), E(0));
            if (now_[i] != 0 || (!all_used && of.used()[i] == 0)) stepped_[i] = 0;
        }
        return stepped_;
    }

private:
    std::span<parameter<E> const> parameters_;
    std::vector<std::uint8_t> from_the_start_, now_;
    std::vector<std::uint8_t> stepped_;  // of to_be_stepped()
};

}  // namespace ddp::detail
