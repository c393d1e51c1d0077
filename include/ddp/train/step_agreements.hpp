/// \file
/// step_agreements: what ranks exchange in a step besides gradients and values, and what they conclude from it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/comm/small_gather.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/nonfinite.hpp>
#include <ddp/train/odd_ranks.hpp>
#include <ddp/train/step_ticket.hpp>
#include <ddp/train/training_progress.hpp>
#include <ddp/train/used_map.hpp>
#include <ddp/transport/any.hpp>

namespace ddp::detail {

/// The memory of a step's messages: it must outlive the transport if the job has failed.
struct step_messages {
    virtual ~step_messages() = default;

    std::vector<step_ticket> tickets;
    std::vector<nonfinite_place> places;
    used_map used;
};

/// The small exchanges of a trainer's steps, and how the messages of a step are distinguished. Each gives the same
/// result on all ranks. All of it belongs to the communication side, except hash(), compared() and use().
///
/// Cost  all_gather_small of a step_ticket at the start of each step; of a bit a parameter where parameters may be left out; of
///       a place and a norm where the mean gradient is not finite, and, where every rank computes the norm by itself, in every
///       step that looks for that.
template <Transport T, Element E>
class step_agreements {
public:
    /// Among the ranks of `of`. `where` and `parameters` are of the arena with the values. All outlive this.
    step_agreements(scheduler<T>& on, group& of, layout const& where, std::span<parameter<E> const> parameters,
                    std::shared_ptr<step_messages> messages, bool tracks_used, std::uint64_t agreement_steps)
        : on_(on),
          of_(of),
          where_(where),
          parameters_(parameters),
          agreement_steps_(agreement_steps),
          messages_(std::move(messages)) {
        messages_->tickets.resize(ranks());
        messages_->places.resize(ranks());
        if (tracks_used) messages_->used = used_map(ranks(), parameters_.size());
    }

    /// See step_cycle.
    void agree_on(std::uint64_t hash, std::uint32_t context) noexcept {
        hash_ = hash | 1;
        context_ = context;
    }
    [[nodiscard]] std::uint64_t hash() const noexcept { return hash_; }
    [[nodiscard]] std::shared_ptr<void> posted_memory() const noexcept { return messages_; }

    /// Whether anything is compared.
    [[nodiscard]] bool compares() const noexcept { return agreement_steps_ != 0 && ranks() != 1; }
    /// The elements whose bits are compared in step `step`, of an arena of n; none: none ever.
    [[nodiscard]] arena_range compared(std::uint64_t step) const noexcept {
        return compares() ? compared_in(step, agreement_steps_, where_.size()) : arena_range{};
    }

    /// The next step begins.
    void begin() noexcept {
        ++round_;
        ++made_;
        messages_->places[me()] = {};
    }
    /// Records in the group that this rank enters the step.
    void enter() {
        std::uint64_t const fingerprint =
            digest{}.add(hash_).add(round_).value();  // ranks that count differently get an error
        of_.enter({"step", 0, "", "", {.group = context_, .channel = weights_channel, .index = round_}, fingerprint});
    }
    /// The number, in the training, of the current or the last step, from 1.
    [[nodiscard]] std::uint64_t round() const noexcept { return round_; }
    /// The same among the steps of this object, whatever step the training was resumed at.
    [[nodiscard]] std::uint64_t made() const noexcept { return made_; }
    /// The lane for bucket b's messages in this step.
    [[nodiscard]] lane<T> lane_of_bucket(std::size_t b) noexcept {
        return lane_of(4 + 4 * static_cast<std::uint32_t>(b), hash_);
    }

    /// Gathers all ranks' tickets; call total() afterwards.
    [[nodiscard]] task<> gather_tickets(step_ticket const& mine) {
        messages_->tickets[me()] = mine;
        return all_gather_small(lane_of(weights_channel, of_.history()), std::span<step_ticket>(messages_->tickets));
    }
    /// Says that the state of an exchange is compared too, for the text about a difference.
    void compare_exchange() noexcept { exchange_ = true; }
    /// Adds up the tickets of all ranks. If their digests differ, fails the job and throws collective_aborted.
    void total() {
        step_totals const all = detail::total(messages_->tickets);
        if (!all.alike) report_difference();
        previous_loss_ = totals_.weight == 0 ? std::numeric_limits<double>::quiet_NaN()
                                             : all.losses / static_cast<double>(totals_.weight);
        totals_ = all;
    }
    [[nodiscard]] step_totals const& totals() const noexcept { return totals_; }
    /// Mean loss over the samples of all ranks in the step before; NaN if there was none.
    [[nodiscard]] double previous_loss() const noexcept { return previous_loss_; }
    /// Between steps, on all ranks alike. Losses are the next tickets'.
    void set_progress(training_progress const& at) noexcept {
        round_ = at.begun_steps;
        totals_.weight = at.last_weight;
        previous_loss_ = at.previous_loss;
    }

    [[nodiscard]] bool tracks_used() const noexcept { return messages_->used.tracks(); }
    /// used[i] != 0: this rank's backward has reported parameter i.
    void use(std::span<std::uint8_t const> used) noexcept {
        if (tracks_used()) messages_->used.set(me(), used);
    }
    /// Which parameters some rank has used in this step.
    task<> gather_used();
    [[nodiscard]] bool used(std::size_t i) const noexcept { return messages_->used.by_any(i); }

    /// The first place where this rank's own gradient is not finite; written until gather_places().
    [[nodiscard]] nonfinite_place& place() noexcept { return messages_->places[me()]; }
    [[nodiscard]] std::span<nonfinite_place const> places() const noexcept { return messages_->places; }
    /// Gathers all ranks' places, with the norm of the mean gradient on each. If norms differ (where nothing is compared:
    /// if only some are finite), fails the job and throws collective_aborted.
    [[nodiscard]] task<> gather_places(double norm);

private:
    // The channels of a trainer's context: these, and from 4 + 4 b on the four phases of bucket b. The index is the step.
    static constexpr std::uint32_t weights_channel = 0, places_channel = 1, used_channel = 2;

    [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(of_.size()); }
    [[nodiscard]] std::size_t me() const noexcept { return static_cast<std::size_t>(of_.rank()); }
    [[nodiscard]] lane<T> lane_of(std::uint32_t channel, std::uint64_t fingerprint) noexcept {
        return {on_, of_, {.group = context_, .channel = channel, .index = round_}, fingerprint};
    }
    void report_difference();
    [[noreturn]] void report(odd_ranks const& odd) {
        on_.fail(failure_kind::mismatch, errc::replicas_differ, odd.first, odd.text);
        throw collective_aborted();
    }

    scheduler<T>& on_;
    group& of_;
    layout const& where_;
    std::span<parameter<E> const> parameters_;
    std::uint64_t agreement_steps_;
    std::shared_ptr<step_messages> messages_;
    std::uint64_t hash_ = 1;
    std::uint32_t context_ = 0;
    bool exchange_ = false;
    std::uint64_t round_ = 0, made_ = 0;
    step_totals totals_{.everybody_done = false};
    double previous_loss_ = 0;
};

template <Transport T, Element E>
task<> step_agreements<T, E>::gather_used() {
    used_map& used = messages_->used;
    if (ranks() > 1) {
        scratch const table((ranks() + 1) * sizeof(std::size_t));
        std::span<std::size_t> const cuts = table.as<std::size_t>();
        for (std::size_t r = 0; r < cuts.size(); ++r) cuts[r] = r * used.words_a_rank();
        co_await direct_allreduce::all_gather({}, lane_of(used_channel, hash_), used.table(),
                                              std::span<std::size_t const>(cuts));
    }
    used.merge();
}
template <Transport T, Element E>
task<> step_agreements<T, E>::gather_places(double norm) {
    if (is_finite(norm)) place().norm = compares() ? std::bit_cast<std::uint64_t>(norm) : 0;
    co_await all_gather_small(lane_of(places_channel, hash_), std::span<nonfinite_place>(messages_->places));
    auto const has_it = [&](nonfinite_place const& of) { return of.norm == place().norm; };
    if (std::ranges::all_of(messages_->places, has_it)) co_return;
    std::vector<std::uint64_t> norms;
    for (nonfinite_place const& of : messages_->places) norms.push_back(of.norm);
    report(describe_difference(norms, of_.members(), round_, {}, difference::gradients));
}
/// All ranks find the same and report it alike: the ranks that differ from the majority, or all ranks if there is none.
template <Transport T, Element E>
[[gnu::cold]] void step_agreements<T, E>::report_difference() {
    arena_range const part = compared(round_);
    std::vector<std::string_view> names;
    where_.for_each_in(part.begin, part.end,
                       [&](std::size_t i, std::size_t, std::size_t) { names.push_back(parameters_[i].name); });
    std::vector<std::uint64_t> digests;
    for (step_ticket const& t : messages_->tickets) digests.push_back(t.digest);
    report(describe_difference(digests, of_.members(), round_, names,
                               exchange_ ? difference::exchange : difference::values));
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class step_agreements<any_transport, float>;
DDP_INSTANTIATE class step_agreements<any_transport, double>;
#endif

}  // namespace ddp::detail
