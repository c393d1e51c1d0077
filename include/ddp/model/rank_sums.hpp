/// \file
/// rank_sums: sums over the ranks that train a model together, for models whose passes need them.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <span>

namespace ddp {

/// What a trainer gives to a model that asks for it (join_ranks): statistics of the whole batch come from every rank's share.
/// All ranks call add() in the same order and with as many numbers, from the thread that calls the trainer.
class rank_sums {
public:
    rank_sums() = default;
    rank_sums(rank_sums const&) = delete;
    rank_sums& operator=(rank_sums const&) = delete;
    virtual ~rank_sums() = default;

    /// Replaces these numbers by their sums over all ranks, in the canonical order: the same bits on every rank. Once the
    /// trainer is gone they stay as they are. Throws comm_error, the same on every rank.
    virtual void add(std::span<double> mine) = 0;
};

}  // namespace ddp
