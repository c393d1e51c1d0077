/// \file
/// parameter_groups: an optimizer that consists of several, each for the parameters whose names match its pattern.
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
#include <ddp/core/text.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/optim/optimizer_model.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/optim/slot_names.hpp>

namespace ddp {

/// Whether the whole name matches the pattern. In a pattern, `*` matches any sequence of characters, including dots and
/// the empty sequence; `?` matches one character; every other character matches itself. So "head.bias" matches one name,
/// "head.*" all names with this prefix, and "*.bias" all with this suffix. Cost: at most pattern.size() times name.size()
/// comparisons.
[[nodiscard]] constexpr bool name_fits(std::string_view pattern, std::string_view name) noexcept {
    std::size_t p = 0, n = 0, star = pattern.npos, resume = 0;
    while (n < name.size()) {
        if (p < pattern.size() && pattern[p] == '*') {
            star = p++;
            resume = n;
        } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
            ++p;
            ++n;
        } else if (star != pattern.npos) {  // the last star takes one more
            p = star + 1;
            n = ++resume;
        } else {
            return false;
        }
    }
    return pattern.find_first_not_of('*', p) == pattern.npos;
}

/// One group of parameter_groups: the parameters whose names match a pattern, and the optimizer that steps them.
template <class Opt>
struct parameter_group {
    std::string names;  ///< the pattern: see name_fits
    Opt optimizer;      ///< for these parameters
};

/// An optimizer with different hyper-parameters for different parameters, like PyTorch's param_groups:
///
///     ddp::parameter_groups const optimizer{
///         ddp::adamw{.lr = 1e-3},                                  // all others
///         {{"*.bias", ddp::adamw{.lr = 1e-3, .weight_decay = 0}},  // the first that matches
///          {"head.*", ddp::adamw{.lr = 1e-2}}}};
///
/// A parameter belongs to the first group whose pattern matches its name, or otherwise to `others`. When a trainer is
/// made, a group without parameters is an error that names the group, because its pattern is probably misspelt. The
/// factor of the schedule multiplies the rate of every group; clipping by norm covers all groups together. Opt may be
/// any optimizer; groups with different algorithms use any_optimizer or a variant of your own:
///
///     ddp::parameter_groups<ddp::any_optimizer> const optimizer{ddp::adamw{}, {{"embedding.*", ddp::sgd{.lr = 0.1}}}};
///
/// State  for each element as many arrays as the optimizer with the largest slot_count() needs.
/// Cost   one call of step for each sequence of neighbouring parameters of a group in a bucket.
template <class Opt>
class parameter_groups {
    static_assert(
        !requires(Opt const& member, std::span<parameter<float> const> all) { member.groups_of(all); },
        "groups of groups: list all of them in one parameter_groups");

public:
    parameter_groups(Opt others, std::vector<parameter_group<Opt>> groups) : groups_(std::move(groups)) {
        groups_.push_back({"*", std::move(others)});
    }

    [[nodiscard]] std::size_t slot_count() const {
        std::size_t most = 0;
        for (auto const& g : groups_) most = std::max<std::size_t>(most, g.optimizer.slot_count());
        return most;
    }
    /// Of all others, and of a group; groups are numbered as given, all others come last.
    [[nodiscard]] double learning_rate() const { return groups_.back().optimizer.learning_rate(); }
    [[nodiscard]] double learning_rate(std::size_t group) const { return groups_[group].optimizer.learning_rate(); }

    /// Of the slots that a group's optimizer uses; those of others with more are zero in its parameters.
    [[nodiscard]] std::vector<std::string> slot_names(std::size_t group) const {
        return detail::slot_names_of(groups_[group].optimizer);
    }

    /// Of the algorithm of a group.
    [[nodiscard]] std::string name(std::size_t group) const {
        return detail::name_of_optimizer(groups_[group].optimizer);
    }

    /// Covers the patterns and every member.
    [[nodiscard]] std::uint64_t hash() const {
        digest all;
        all.add("parameter_groups");
        for (auto const& g : groups_) all.add(g.names).add(std::uint64_t{g.optimizer.hash()});
        return all.value();
    }
    /// A part for each group: "'*.bias': sgd(lr 0.1, …); '*': …".
    [[nodiscard]] std::string hash_words() const {
        std::string all;
        for (auto const& g : groups_)
            all += detail::concat(
                {all.empty() ? "" : "; ", detail::in_quotes(g.names), ": ", detail::hash_words_of(g.optimizer)});
        return all;
    }
    /// Throws usage_error for a member whose hyper-parameters make no sense, if it can tell.
    void validate() const {
        for (auto const& g : groups_)
            if constexpr (requires { g.optimizer.validate(); }) g.optimizer.validate();
    }

    /// The group of each parameter. Throws usage_error if one of the groups would have none.
    template <Element E>
    [[nodiscard]] std::vector<std::size_t> groups_of(std::span<parameter<E> const> parameters) const {
        std::vector<std::size_t> result, sizes(groups_.size());
        for (parameter<E> const& p : parameters) {
            std::size_t group = 0;
            while (!name_fits(groups_[group].names, p.name)) ++group;  // the last takes all
            result.push_back(group);
            ++sizes[group];
        }
        for (std::size_t g = 0; g + 1 < groups_.size(); ++g)
            DDP_EXPECTS(sizes[g] != 0, nothing_for(groups_[g].names, parameters));
        return result;
    }

    /// Whether some member steps by norms of whole parameters.
    [[nodiscard]] bool needs_norms() const {
        return std::ranges::any_of(groups_, [](auto const& g) { return detail::needs_norms<float>(g.optimizer); });
    }
    /// What comes before the step of a range of group at.group, where its member has prepare().
    template <Element E>
        requires detail::HasPrepare<Opt, E>
    void prepare(step_info const& at, std::span<E> gradient, std::span<E const> value, slot_spans<E> slots) const {
        Opt const& member = groups_[at.group].optimizer;
        member.prepare(at, gradient, value, slots.first(member.slot_count()));
    }

    /// Steps a range that lies in parameters of group at.group.
    template <Element E>
        requires OptimizerFor<Opt, E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> slots) const {
        DDP_EXPECTS(at.group < groups_.size(), "parameter_groups: step_info::group must be one that groups_of() gave");
        Opt const& member = groups_[at.group].optimizer;
        member.step(at, gradient, value, slots.first(member.slot_count()));
    }

private:
    template <Element E>
    static std::string nothing_for(std::string const& names, std::span<parameter<E> const> parameters) {
        std::string text = "parameter_groups: no parameter is left for the group '" + names + "': ";
        for (parameter<E> const& p : parameters)
            if (name_fits(names, p.name))
                return text + "'" + p.name +
                       "', for example, matches an earlier group. Put the narrower pattern first.";
        text += "the model's are named";
        for (std::size_t i = 0; i < parameters.size() && i < 8; ++i)
            text += (i == 0 ? " '" : ", '") + parameters[i].name + "'";
        return text + (parameters.size() > 8 ? ", …" : "") + ". '*' stands for any characters, '?' for one.";
    }

    std::vector<parameter_group<Opt>> groups_;  // all others last, with "*"
};
static_assert(OptimizerFor<parameter_groups<sgd>, float> && !OptimizerFor<parameter_groups<int>, float>);

}  // namespace ddp
