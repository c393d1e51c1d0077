// A heat equation on a square plate whose edges are joined, u_t = div(k(u) grad u) with k(u) = 0.2 + u^2, explicit in time.
// Rows are spread over the ranks of the user's own communicator; two rows of each neighbour stand above and below ours.
#pragma once

#include <algorithm>
#include <array>
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/nonblocking.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ddp/core/random.hpp>
#include <span>
#include <stdexcept>
#include <vector>

class heat_solver {
public:
    static constexpr std::size_t n = 96;  // the plate is n x n
    static constexpr int halo = 2;

    explicit heat_solver(boost::mpi::communicator const& world)
        : world_(world),
          first_(n * rank_of(0) / rank_of(1)),
          rows_(n * (rank_of(0) + 1) / rank_of(1) - first_),
          now_((rows_ + 2 * halo) * n, 0.0f),
          next_(now_) {
        if (n / rank_of(1) < halo)
            throw std::invalid_argument("heat_solver: every rank needs two rows: at most 48 ranks");
        exchange_halos();
    }

    [[nodiscard]] bool owns(std::size_t row) const { return row >= first_ && row < first_ + rows_; }
    /// At a row of the plate that is ours, or up to `halo` rows away; columns go round.
    [[nodiscard]] float at(std::size_t row, std::size_t column, int down = 0, int right = 0) const {
        return now_[place(row - first_, down) + (column + n + static_cast<std::size_t>(right)) % n];
    }

    /// Heats a spot: pulse number `i` lands where a random number that all ranks know says.
    void pulse(std::uint64_t i) {
        ddp::random_stream const spots{11, ddp::random_use::user, 0};
        auto const random = [&](std::uint64_t k) { return spots.at(3 * i + k).uniform<float>(); };
        float const y = random(0) * n, x = random(1) * n, heat = 0.5f + 0.5f * random(2);
        auto const apart = [](std::size_t a, float b) {
            float const d = std::abs(static_cast<float>(a) - b);
            return std::min(d, static_cast<float>(n) - d);
        };
        for (std::size_t r = 0; r < rows_; ++r)
            for (std::size_t c = 0; c < n; ++c) {
                float const dy = apart(first_ + r, y), dx = apart(c, x);
                float& u = now_[place(r) + c];
                u += heat * std::exp(-(dy * dy + dx * dx) / 32) * (1 - u);
            }
        exchange_halos();
    }

    /// One time step, which ends with fresh halos. The plate loses a little heat everywhere.
    void step() {
        auto const flux = [](float a, float b) { return (0.2f + 0.25f * (a + b) * (a + b)) * (b - a); };
        for (std::size_t r = 0; r < rows_; ++r)
            for (std::size_t c = 0; c < n; ++c) {
                std::size_t const row = place(r), left = (c + n - 1) % n, right = (c + 1) % n;
                float const u = now_[row + c];
                float const in = flux(u, now_[row - n + c]) + flux(u, now_[row + n + c]) + flux(u, now_[row + left]) +
                                 flux(u, now_[row + right]);
                next_[row + c] = 0.995f * (u + 0.15f * in);
            }
        now_.swap(next_);
        exchange_halos();
    }

private:
    [[nodiscard]] std::size_t rank_of(int what) const {
        return static_cast<std::size_t>(what == 0 ? world_.rank() : world_.size());
    }
    [[nodiscard]] static std::size_t place(std::size_t row, int down = 0) {
        return (row + halo + static_cast<std::size_t>(down)) * n;
    }
    void exchange_halos() {
        int const up = (world_.rank() + world_.size() - 1) % world_.size(), down = (world_.rank() + 1) % world_.size();
        int const count = halo * static_cast<int>(n);
        std::array<boost::mpi::request, 4> all{
            world_.irecv(up, 0, &now_[0], count), world_.irecv(down, 1, &now_[place(rows_)], count),
            world_.isend(down, 0, &now_[place(rows_ - halo)], count), world_.isend(up, 1, &now_[place(0)], count)};
        boost::mpi::wait_all(all.begin(), all.end());
    }

    boost::mpi::communicator const& world_;
    std::size_t first_, rows_;  // of the plate, ours
    std::vector<float> now_, next_;
};
