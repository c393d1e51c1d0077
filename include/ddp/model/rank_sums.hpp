/// \file
/// rank_sums: sums over the ranks that train a model together, for models whose passes need them.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <span>

#include <ddp/core/interface.hpp>

namespace ddp {

/// A trainer passes this to a model that has join_ranks(), for statistics of the whole batch, of which each rank has a share.
/// All ranks call add() in the same order and with equally many numbers, from the thread that calls the trainer.
class rank_sums : public detail::interface {
public:
    /// Replaces these numbers by their sums over all ranks, in the canonical order: the same bits on every rank. Once the
    /// trainer has been destroyed, the numbers are left unchanged. Throws comm_error, the same on every rank.
    virtual void add(std::span<double> mine) = 0;
};

}  // namespace ddp
