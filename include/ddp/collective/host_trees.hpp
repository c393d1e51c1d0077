/// \file
/// host_trees: how the canonical tree over ranks lies across their hosts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/kernel/combine.hpp>
#include <ddp/kernel/operation.hpp>

namespace ddp {

/// The canonical tree divided into subtrees whose ranks are all on one host, each as large as possible. A host can add up each
/// of its subtrees by itself; hosts then exchange only these sums.
///
/// If each host has a block of ranks whose size is a power of two, there is one subtree for each host. Other placements have
/// more; ranks placed round-robin have one each, which gives the same result and saves nothing.
class host_trees {
public:
    /// Ranks [begin, end), all of one host.
    struct subtree {
        std::size_t begin, end;
        std::size_t host;
        [[nodiscard]] std::size_t size() const noexcept { return end - begin; }
    };

    /// `hosts`: of each rank, the number of its host, from 0 on without gaps.
    explicit host_trees(std::span<std::size_t const> hosts) : host_of_(hosts.begin(), hosts.end()) {
        DDP_EXPECTS(!hosts.empty(), "host_trees: there must be a rank");
        ranks_.resize(1 + *std::max_element(hosts.begin(), hosts.end()));
        for (std::size_t r = 0; r < hosts.size(); ++r) ranks_[hosts[r]].push_back(r);
        find(0, hosts.size());
        regular_ = same_shape(0, hosts.size(), 0, subtrees_.size());
    }

    /// In the order of their ranks.
    [[nodiscard]] std::span<subtree const> subtrees() const noexcept { return subtrees_; }
    [[nodiscard]] std::size_t hosts() const noexcept { return ranks_.size(); }
    [[nodiscard]] std::size_t host_of(std::size_t rank) const noexcept { return host_of_[rank]; }
    [[nodiscard]] std::span<std::size_t const> ranks_of(std::size_t host) const noexcept { return ranks_[host]; }
    /// The rank that stands for rank `of` on another host: the one in the same place there, modulo the number of its ranks.
    [[nodiscard]] std::size_t counterpart(std::size_t of, std::size_t host) const noexcept {
        std::vector<std::size_t> const &own = ranks_[host_of_[of]], &there = ranks_[host];
        std::size_t const place = static_cast<std::size_t>(std::find(own.begin(), own.end(), of) - own.begin());
        return there[place % there.size()];
    }
    /// The ranks of other hosts for which this one stands on its own host, in the order of the hosts that follow its own, so
    /// that each host begins with another one.
    [[nodiscard]] std::vector<std::size_t> stands_for(std::size_t rank) const {
        std::vector<std::size_t> all;
        for (std::size_t d = 1; d < hosts(); ++d)
            for (std::size_t const other : ranks_of((host_of(rank) + d) % hosts()))
                if (counterpart(other, host_of(rank)) == rank) all.push_back(other);
        return all;
    }

    /// The canonical tree over all ranks, times a factor, from the sums of the subtrees: the same bits as combine_tree_scaled
    /// over the data of all ranks.
    ///
    /// out      n elements; may be exactly one of the sources.
    /// sources  n elements for each subtree, in order.
    /// Cost     one pass; where the subtrees do not lie as ranks in a canonical tree do, through 4 KiB of stack a level.
    template <class Op, Number E>
        requires OperationOn<Op, E>
    void combine(std::span<E> out, std::span<std::type_identity_t<E> const* const> sources,
                 std::type_identity_t<E> factor) const {
        if (regular_) return combine_tree_scaled<Op>(out, sources, factor);
        for (std::size_t at = 0; at < out.size(); at += block) {
            std::size_t next = 0;
            join<Op>(out.data() + at, {0, host_of_.size()}, next, sources, at, std::min(block, out.size() - at),
                     factor);
        }
    }

private:
    static constexpr std::size_t block = detail::kernels::combine_block;
    struct range {
        std::size_t begin, end;
        [[nodiscard]] std::size_t middle() const noexcept { return begin + canonical_split(end - begin); }
    };

    void find(std::size_t begin, std::size_t end) {
        auto const first = host_of_.begin() + static_cast<std::ptrdiff_t>(begin),
                   last = host_of_.begin() + static_cast<std::ptrdiff_t>(end);
        if (std::all_of(first, last, [&](std::size_t host) { return host == *first; })) {
            subtrees_.push_back({begin, end, *first});
            return;
        }
        std::size_t const middle = begin + canonical_split(end - begin);
        find(begin, middle);
        find(middle, end);
    }
    /// Whether the tree over ranks [begin, end) joins these subtrees as one over that many ranks joins these.
    [[nodiscard]] bool same_shape(std::size_t begin, std::size_t end, std::size_t first, std::size_t count) const {
        if (count == 1) return true;
        std::size_t const half = canonical_split(count), middle = begin + canonical_split(end - begin);
        return subtrees_[first + half].begin == middle && same_shape(begin, middle, first, half) &&
               same_shape(middle, end, first + half, count - half);
    }
    /// Element range [at, at + count) of the tree over some ranks, in `out`. `next`: their first subtree.
    template <class Op, Number E>
    void join(E* out, range ranks, std::size_t& next, std::span<E const* const> sources, std::size_t at,
              std::size_t count, E factor) const {
        if (subtrees_[next].end == ranks.end) {  // one subtree
            E const* const source = sources[next++] + at;
            return detail::kernels::combine_sources<Op, E, 1>(out, &source, 0, count, factor);
        }
        E left[block];
        E right[block];
        join<Op>(left, {ranks.begin, ranks.middle()}, next, sources, at, count, E(1));
        join<Op>(right, {ranks.middle(), ranks.end}, next, sources, at, count, E(1));
        E const* const halves[] = {left, right};
        detail::kernels::combine_sources<Op, E, 2>(out, halves, 0, count, factor);
    }

    std::vector<std::size_t> host_of_;
    std::vector<std::vector<std::size_t>> ranks_;  // by host
    std::vector<subtree> subtrees_;
    bool regular_ = false;
};

}  // namespace ddp
