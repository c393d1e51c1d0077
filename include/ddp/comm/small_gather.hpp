/// \file
/// all_gather_small: one small value of every rank, to all ranks. Ranks use it to agree.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>

#include <ddp/comm/lane.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/task.hpp>

namespace ddp {

/// A type that collectives without arithmetic can move: one that can be copied byte by byte.
template <class V>
concept Movable = std::is_trivially_copyable_v<V> && !std::is_const_v<V> && !std::is_volatile_v<V>;

namespace detail {

/// Blocks of equal size, in ceil(log2 P) messages: in round k a rank sends the 2^k blocks from its own on (fewer in the
/// last round) to the rank 2^k below it. Scratch for the whole table.
/// Source  Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
///         IEEE TPDS 8(11), 1997.
template <Transport T>
task<> bruck_all_gather(lane<T> over, mutable_bytes table, std::size_t block) {
    std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
    std::size_t const rounds = static_cast<std::size_t>(std::bit_width(ranks - 1));
    scratch memory(table.size());
    mutable_bytes const rotated = memory.bytes();  // place i: the block of rank (me + i) % P
    operations in(rounds), out(rounds);
    auto const blocks = [=](std::size_t k) { return std::min(std::size_t{1} << k, ranks - (std::size_t{1} << k)); };
    for (std::size_t k = 0; k < rounds; ++k)
        over.receive(in[k], static_cast<int>((me + (std::size_t{1} << k)) % ranks),
                     rotated.subspan(block << k, blocks(k) * block));
    std::memcpy(rotated.data(), table.data() + me * block, block);
    for (std::size_t k = 0; k < rounds; ++k) {
        over.send(out[k], static_cast<int>((me + ranks - (std::size_t{1} << k)) % ranks),
                  rotated.first(blocks(k) * block));
        co_await in[k];
    }
    std::size_t const wrap = (ranks - me) * block;  // bytes of ranks me … P-1
    std::memcpy(table.data() + me * block, rotated.data(), wrap);
    std::memcpy(table.data(), rotated.data() + wrap, table.size() - wrap);
    for (std::size_t k = 0; k < rounds; ++k) co_await out[k];
}

}  // namespace detail

/// Gathers one small value of every rank on all ranks, over a lane: `table[r]` becomes rank r's value. On entry only
/// this rank's has to be set.
///
/// table   size() values, one per rank. All bytes of a V are sent, padding included.
/// Cost    ceil(log2 P) messages, (P-1) sizeof(V) bytes sent per rank; scratch for one table.
/// Throws  collective_aborted inside the scheduler; usage_error if `table` has another size.
template <Transport T, Movable V>
task<> all_gather_small(lane<T> over, std::span<V> table) {
    DDP_EXPECTS(table.size() == static_cast<std::size_t>(over.size()),
                "all_gather_small: `table` needs one entry per rank");
    return detail::bruck_all_gather(over, as_mutable_bytes(table), sizeof(V));
}

}  // namespace ddp
