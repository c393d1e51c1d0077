/// \file
/// reduce_on_plateau: lowers the learning rate when a metric has stopped improving, the same on every rank.
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
#include <ddp/core/text.hpp>
#include <ddp/train/counters_text.hpp>
#include <ddp/train/early_stopping.hpp>

namespace ddp {

/// When the rate is lowered, and by how much. The same on every rank, or rank 0's decide.
struct reduce_on_plateau_options {
    double factor = 0.1;  ///< what the rate is multiplied by; in [0, 1)
    std::size_t patience =
        10;  ///< updates in a row without an improvement that are allowed: the next one lowers the rate
    double threshold = 1e-4;   ///< how much better than the best so far counts as an improvement: more than this
    bool relative = true;      ///< `threshold` is a fraction of the best metric; false: it is a difference
    std::size_t cooldown = 0;  ///< updates after a reduction in which nothing is counted
    double floor = 0;          ///< the rate's factor never falls below this; in [0, 1]
    ddp::better better = ddp::better::lower;  ///< which values are better: `lower` for losses
};

/// A factor of the learning rate that begins at 1 and falls with a metric that does not improve:
///
///     ddp::reduce_on_plateau plateau{{.patience = 2}};
///     for (int epoch = 0; epoch < 50; ++epoch) {
///         train_an_epoch(trainer);
///         auto const metrics = ddp::evaluate(trainer, [&] { return order.next(); }, load);
///         plateau.update(comm, metrics.loss());       // collective
///         trainer.set_rate_factor(plateau.factor());  // collective
///     }
///
/// update(comm, metric): rank 0's metric decides, and every rank takes over rank 0's state, options included.
/// update(metric) decides by itself, without a message: for one rank, or for metrics with the same bits everywhere, as
/// evaluate and sum_over_ranks return them.
///
/// It belongs to the program: to keep it in a checkpoint, save its text() as an entry:
///
///     kept.save(trainer, batches, {{"plateau", plateau.text()}});
///     if (auto const from = kept.resume(trainer, batches)) plateau.restore(from->entries.at("plateau"));
///
/// NaN is no improvement. A relative threshold is for metrics above 0. Trivially copyable.
/// Source: torch's ReduceLROnPlateau, whose threshold_mode is `relative`, and whose min_lr is `floor` times the
/// optimizer's rate; without its eps.
class reduce_on_plateau {
public:
    /// Throws usage_error for a factor outside [0, 1), a threshold that is negative or not finite (relative: or not below
    /// 1), and a floor outside [0, 1].
    explicit reduce_on_plateau(reduce_on_plateau_options options = {}) : options_(options) {
        DDP_EXPECTS(options.factor >= 0 && options.factor < 1, "reduce_on_plateau: factor is " +
                                                                   detail::decimal(options.factor) +
                                                                   "; it must lie in [0, 1), and 0.1 is usual");
        DDP_EXPECTS(detail::is_finite(options.threshold) && options.threshold >= 0 &&
                        (!options.relative || options.threshold < 1),
                    "reduce_on_plateau: threshold is " + detail::decimal(options.threshold) +
                        "; it must be a finite number >= 0, below 1 where it is relative; set `better` to the "
                        "direction of improvement");
        DDP_EXPECTS(options.floor >= 0 && options.floor <= 1, "reduce_on_plateau: floor is " +
                                                                  detail::decimal(options.floor) +
                                                                  "; it must lie in [0, 1], and 0 is usual");
        double const infinity = std::numeric_limits<double>::infinity();
        best_ = options.better == better::lower ? infinity : -infinity;
    }

    /// Takes the next metric; returns factor().
    double update(double metric) noexcept {
        ++updates_;
        if (improves(metric)) {
            best_ = metric;
            bad_ = 0;
        } else {
            ++bad_;
        }
        if (cooling_ > 0) {
            --cooling_;
            bad_ = 0;
        }
        reduced_ = bad_ > options_.patience;
        if (reduced_) {
            double const next = factor_ * options_.factor;
            factor_ = next < options_.floor ? options_.floor : next;
            cooling_ = options_.cooldown;
            bad_ = 0;
        }
        return factor_;
    }

    /// The same on every rank, by rank 0's metric and state. Collective: every rank calls it.
    /// Cost: one broadcast of some 110 bytes. Throws comm_error.
    template <Transport T>
    double update(communicator<T> const& comm, double metric) {
        update(metric);
        reduce_on_plateau_options const& o = options_;
        detail::posted const all(
            comm, record{best_, factor_, o.factor, o.threshold, o.floor, bad_, cooling_, updates_, o.patience,
                         o.cooldown, o.relative, static_cast<std::uint64_t>(o.better), reduced_});
        broadcast(comm, std::span<record>(&*all, 1));
        record const& got = *all;
        best_ = got.best, factor_ = got.factor, reduced_ = got.reduced != 0;
        bad_ = static_cast<std::size_t>(got.bad), cooling_ = static_cast<std::size_t>(got.cooling);
        updates_ = static_cast<std::size_t>(got.updates);
        options_ = {.factor = got.by,
                    .patience = static_cast<std::size_t>(got.patience),
                    .threshold = got.threshold,
                    .relative = got.relative != 0,
                    .cooldown = static_cast<std::size_t>(got.cooldown),
                    .floor = got.floor,
                    .better = static_cast<ddp::better>(got.better)};
        return factor_;
    }

    /// The factor of the optimizer's learning rate, for data_parallel::set_rate_factor.
    [[nodiscard]] double factor() const noexcept { return factor_; }
    /// Whether the last update lowered the factor, or would have but for the floor.
    [[nodiscard]] bool reduced() const noexcept { return reduced_; }
    /// The best metric; before the first improvement the worst infinity.
    [[nodiscard]] double best() const noexcept { return best_; }
    [[nodiscard]] std::size_t updates() const noexcept { return updates_; }

    /// All but the options, exactly, as one line: for a checkpoint's entries.
    [[nodiscard]] std::string text() const {
        numbers all(*this);
        return detail::counters_text(name, all.named());
    }
    /// Continues from where text() was called, with its own options. Not collective: pass the same text on all ranks, as
    /// checkpoints::resume returns it; rank 0 alone is enough if update(comm, metric) follows.
    /// Throws  data_error (errc::format) for anything that text() did not return; nothing has changed then.
    void restore(std::string_view text) {
        numbers all(*this);
        detail::counters_from(name, text, all.named());
        if (!(all.factor >= 0 && all.factor <= 1) || all.best != all.best || all.reduced > 1)
            throw data_error(errc::format,
                             std::string(name) + ": a factor lies in [0, 1], and a best metric is a number");
        best_ = all.best, factor_ = all.factor, reduced_ = all.reduced != 0;
        bad_ = static_cast<std::size_t>(all.bad), cooling_ = static_cast<std::size_t>(all.cooling);
        updates_ = static_cast<std::size_t>(all.updates);
    }

private:
    static constexpr char const* name = "reduce_on_plateau";
    struct numbers {
        explicit numbers(reduce_on_plateau const& of) noexcept
            : best(of.best_),
              factor(of.factor_),
              bad(of.bad_),
              cooling(of.cooling_),
              updates(of.updates_),
              reduced(of.reduced_ ? 1 : 0) {}
        [[nodiscard]] std::array<detail::named_number, 6> named() noexcept {
            return {{{.name = "best", .real = &best},
                     {.name = "factor", .real = &factor},
                     {.name = "bad", .whole = &bad},
                     {.name = "cooling", .whole = &cooling},
                     {.name = "updates", .whole = &updates},
                     {.name = "reduced", .whole = &reduced}}};
        }
        double best, factor;
        std::uint64_t bad, cooling, updates, reduced;
    };
    [[nodiscard]] bool improves(double metric) const noexcept {
        double const by = options_.threshold;
        if (options_.better == better::lower) return metric < (options_.relative ? best_ * (1 - by) : best_ - by);
        return metric > (options_.relative ? best_ * (1 + by) : best_ + by);
    }

    struct record {  // what travels: no padding
        double best, factor, by, threshold, floor;
        std::uint64_t bad, cooling, updates, patience, cooldown, relative, better, reduced;
    };
    static_assert(sizeof(record) == 5 * sizeof(double) + 8 * sizeof(std::uint64_t));

    reduce_on_plateau_options options_;
    double best_;
    double factor_ = 1;
    std::size_t bad_ = 0;      // updates in a row without an improvement
    std::size_t cooling_ = 0;  // updates that are still not counted
    std::size_t updates_ = 0;
    bool reduced_ = false;
};

}  // namespace ddp
