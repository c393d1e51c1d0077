/// \file
/// What train/plan_exchange.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ddp/train/plan_exchange.hpp>

namespace ddp::detail {

DDP_DECL exchange_bucket without_frozen_ends(exchange_bucket const& whole, std::span<std::uint8_t const> frozen) {
    exchange_bucket part = whole;
    std::erase_if(part.pieces, [&](exchange_piece const& piece) { return frozen[piece.parameter] != 0; });
    if (part.pieces.empty() || part.pieces.size() == whole.pieces.size()) return whole;
    std::size_t const from = part.pieces.front().begin, to = part.pieces.back().begin + part.pieces.back().count;
    part.begin += from;
    part.count = to - from;
    for (exchange_piece& piece : part.pieces) piece.begin -= from;
    for (std::size_t& cut : part.cuts) cut = std::clamp(cut, from, to) - from;
    return part;
}

}  // namespace ddp::detail
