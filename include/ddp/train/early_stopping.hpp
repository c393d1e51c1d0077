/// \file
/// early_stopping: says when a metric has not improved for too long, the same on every rank.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include <ddp/collective/broadcast.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/posted.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/math.hpp>
#include <ddp/train/counters_text.hpp>

namespace ddp {

/// Which of two metrics is the better one: the lower, as for losses, or the higher, as for accuracies.
enum class better : std::uint8_t { lower, higher };

/// When training stops. The same on every rank, or rank 0's decide.
struct early_stopping_options {
    std::size_t patience = 3;  ///< updates in a row without an improvement after which training stops
    double min_delta = 0.0;    ///< how much better than the best so far counts as an improvement: more than this
    ddp::better better = ddp::better::lower;  ///< which values are better: `lower` for losses
};

/// Keeps the best metric so far, and counts how long ago it was seen.
///
///     ddp::early_stopping stopping{{.patience = 5, .min_delta = 1e-3}};
///     while (!stopping.stopped()) {
///         train_an_epoch(trainer);
///         auto const metrics = ddp::evaluate(trainer, [&] { return order.next(); }, load);
///         stopping.update(comm, metrics.loss());  // collective
///         if (stopping.improved()) keep_values(trainer);
///     }
///
/// A rank that stops alone leaves the others waiting for it. update(comm, metric) keeps the ranks together: rank 0's metric
/// decides, and every rank takes over rank 0's state, options included; what other ranks pass is not read, so they may
/// have evaluated nothing. update(metric) decides by itself, without a message: for one rank, or for metrics with the
/// same bits everywhere, as evaluate and sum_over_ranks return them.
///
/// NaN, and an infinity that is worse than every number, do not count as improvements: they count against the patience,
/// from the first update on. Source: Keras' EarlyStopping, for the meaning of patience and min_delta.
class early_stopping {
public:
    /// Throws usage_error for a patience of 0 and a min_delta that is negative or not finite.
    explicit early_stopping(early_stopping_options options = {}) : options_(options), best_(worst()) {
        DDP_EXPECTS(options.patience > 0,
                    "early_stopping: patience counts updates without an improvement, and is at "
                    "least 1, which stops at the first of them");
        DDP_EXPECTS(
            detail::is_finite(options.min_delta) && options.min_delta >= 0,
            "early_stopping: min_delta must be a finite number >= 0; set `better` to the direction of improvement");
    }

    /// Takes the next metric; true: stop. Training may continue anyway: the next improvement resets the count.
    bool update(double metric) noexcept {
        ++updates_;
        if (options_.better == better::lower ? metric < best_ - options_.min_delta
                                             : metric > best_ + options_.min_delta) {
            best_ = metric;
            best_update_ = updates_;
        }
        return stopped();
    }

    /// The same on every rank, by rank 0's metric and state. Collective: every rank calls it.
    /// Cost: one broadcast of some 50 bytes. Throws comm_error.
    template <Transport T>
    bool update(communicator<T> const& comm, double metric) {
        update(metric);
        detail::posted const all(comm, record{best_, options_.min_delta, best_update_, updates_, options_.patience,
                                              static_cast<std::uint64_t>(options_.better)});
        broadcast(comm, std::span<record>(&*all, 1));
        best_ = all->best;
        best_update_ = static_cast<std::size_t>(all->best_update), updates_ = static_cast<std::size_t>(all->updates);
        options_ = {static_cast<std::size_t>(all->patience), all->min_delta, static_cast<ddp::better>(all->better)};
        return stopped();
    }

    /// Whether the last `patience` updates were no improvement.
    [[nodiscard]] bool stopped() const noexcept { return updates_ - best_update_ >= options_.patience; }
    /// Whether the last update was the best so far.
    [[nodiscard]] bool improved() const noexcept { return updates_ != 0 && best_update_ == updates_; }

    /// The best metric; before the first improvement the worst infinity.
    [[nodiscard]] double best() const noexcept { return best_; }
    /// The update that reported it, counted from 1; 0: there was no improvement yet.
    [[nodiscard]] std::size_t best_update() const noexcept { return best_update_; }
    [[nodiscard]] std::size_t updates() const noexcept { return updates_; }

    /// All but the options, exactly, as one line: for a checkpoint's entries, as reduce_on_plateau's.
    [[nodiscard]] std::string text() const {
        numbers all(*this);
        return detail::counters_text(name, all.named());
    }
    /// Continues from where text() was called, with its own options. Not collective: see reduce_on_plateau::restore.
    /// Throws  data_error (errc::format) for anything that text() did not return; nothing has changed then.
    void restore(std::string_view text) {
        numbers all(*this);
        detail::counters_from(name, text, all.named());
        if (all.best_update > all.updates || all.best != all.best)
            throw data_error(
                errc::format,
                std::string(name) +
                    ": in a line of text() the best metric is a number, and best_update is at most updates");
        best_ = all.best;
        best_update_ = static_cast<std::size_t>(all.best_update), updates_ = static_cast<std::size_t>(all.updates);
    }

private:
    static constexpr char const* name = "early_stopping";
    struct numbers {
        explicit numbers(early_stopping const& of) noexcept
            : best(of.best_), best_update(of.best_update_), updates(of.updates_) {}
        [[nodiscard]] std::array<detail::named_number, 3> named() noexcept {
            return {{{.name = "best", .real = &best},
                     {.name = "best_update", .whole = &best_update},
                     {.name = "updates", .whole = &updates}}};
        }
        double best;
        std::uint64_t best_update, updates;
    };
    [[nodiscard]] double worst() const noexcept {
        double const infinity = std::numeric_limits<double>::infinity();
        return options_.better == better::lower ? infinity : -infinity;
    }

    struct record {  // what travels: no padding
        double best, min_delta;
        std::uint64_t best_update, updates, patience, better;
    };
    static_assert(sizeof(record) == 2 * sizeof(double) + 4 * sizeof(std::uint64_t));

    early_stopping_options options_;
    double best_;
    std::size_t best_update_ = 0;
    std::size_t updates_ = 0;
};

}  // namespace ddp
