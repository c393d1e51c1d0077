/// \file
/// tanh_mlp: a small network written by hand, smooth and free of libraries, for tests of the trainer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/random.hpp>
#include <ddp/model/model.hpp>

namespace ddp::test {

/// Rows of inputs and of what the model should answer with.
template <Element E>
struct regression {
    std::span<E const> x;  // (rows, in)
    std::span<E const> y;  // (rows, out)
    std::size_t rows = 0;
    [[nodiscard]] std::size_t size() const noexcept { return rows; }
};

/// How a model holds its memory.
enum class memory : std::uint8_t {
    bound,      ///< in the trainer's arena
    releasing,  ///< so, and it says when it has read a value for the last time
    packed,     ///< releasing, and one array over all parameters
    copied,     ///< in its own: the trainer copies gradients out and values in
};

/// z = w2 tanh(w1 x + b1) + b2, half the squared error, mean over the rows. One of its parameters has no elements.
/// Sums over the rows are taken one after the other: bits do not depend on where memory lies.
template <Element E, memory Kind = memory::releasing>
class tanh_mlp {
public:
    using element = E;
    static constexpr bool ready_releases = Kind == memory::releasing || Kind == memory::packed;
    static constexpr bool contiguous = Kind == memory::packed;
    enum parameter_index : std::size_t { w1, b1, none, w2, b2 };
    std::size_t slice = 0;  // gradients are reported so many elements at a time; 0: each at once

    tanh_mlp(std::size_t in, std::size_t hidden, std::size_t out, std::uint64_t seed)
        : in_(in), hidden_(hidden), out_(out) {
        std::size_t const counts[] = {hidden * in, hidden, 0, out * hidden, out};
        for (std::size_t i = 0; i < 5; ++i) {
            own_.emplace_back(2 * counts[i]);
            value_.push_back(std::span<E>(own_[i]).first(counts[i]));
            gradient_.push_back(std::span<E>(own_[i]).last(counts[i]));
            random_stream const draws(seed, random_use::initial_values, i);
            for (std::size_t k = 0; k < counts[i]; ++k) value_[i][k] = draws.at(k).symmetric<E>() / E(2);
        }
    }
    tanh_mlp(tanh_mlp const&) = delete;
    tanh_mlp& operator=(tanh_mlp const&) = delete;

    [[nodiscard]] std::vector<parameter<E>> parameters() {
        std::vector<std::vector<std::size_t>> const shapes = {
            {hidden_, in_}, {hidden_}, {0, 3}, {out_, hidden_}, {out_}};
        char const* const names[] = {"w1", "b1", "none", "w2", "b2"};
        std::vector<parameter<E>> all;
        for (std::size_t i = 0; i < 5; ++i) all.push_back({names[i], shapes[i], value_[i], gradient_[i]});
        return all;
    }
    void bind(storage<E> const& memory)
        requires(Kind != memory::copied)
    {
        value_ = memory.values;
        gradient_ = memory.gradients;
        owner_ = memory.owner;
        own_.clear();
        if (memory.all_values.empty() == contiguous) throw std::logic_error("an array over all parameters, or none");
        if (!contiguous) return;
        std::size_t at = 0;
        for (std::size_t i = 0; i < value_.size(); at += value_[i++].size())
            if (value_[i].data() != memory.all_values.data() + at ||
                gradient_[i].data() != memory.all_gradients.data() + at)
                throw std::logic_error("parameters of a contiguous model do not follow each other");
        if (at != memory.all_values.size()) throw std::logic_error("the array is longer than its parameters");
    }
    [[nodiscard]] std::span<E> value(std::size_t i) noexcept { return value_[i]; }
    [[nodiscard]] std::span<E> gradient(std::size_t i) noexcept { return gradient_[i]; }

    double forward(regression<E> const& batch) {
        batch_ = batch;
        h_.resize(batch.rows * hidden_);
        d_.resize(batch.rows * out_);
        double loss = 0;
        for (std::size_t r = 0; r < batch.rows; ++r) {
            for (std::size_t j = 0; j < hidden_; ++j) {
                E sum = value_[b1][j];
                for (std::size_t k = 0; k < in_; ++k) sum += value_[w1][j * in_ + k] * batch.x[r * in_ + k];
                h_[r * hidden_ + j] = std::tanh(sum);
            }
            for (std::size_t o = 0; o < out_; ++o) {
                E sum = value_[b2][o];
                for (std::size_t j = 0; j < hidden_; ++j) sum += value_[w2][o * hidden_ + j] * h_[r * hidden_ + j];
                E const d = sum - batch.y[r * out_ + o];
                d_[r * out_ + o] = d;
                loss += 0.5 * static_cast<double>(d) * static_cast<double>(d);
            }
        }
        return loss / static_cast<double>(batch.rows);
    }

    template <class Ready>
    void backward(pass<E> how, Ready const& ready) {
        E const factor = how.scale / static_cast<E>(batch_.rows);
        for (E& d : d_) d *= factor;
        dh_.assign(batch_.rows * hidden_, E(0));
        for (std::size_t r = 0; r < batch_.rows; ++r)
            for (std::size_t o = 0; o < out_; ++o)
                for (std::size_t j = 0; j < hidden_; ++j)
                    dh_[r * hidden_ + j] += d_[r * out_ + o] * value_[w2][o * hidden_ + j];
        add_up(how, b2, d_, {}, 1, ready);
        add_up(how, w2, d_, h_, hidden_, ready);
        ready(none);
        for (std::size_t i = 0; i < dh_.size(); ++i) dh_[i] *= E(1) - h_[i] * h_[i];
        add_up(how, b1, dh_, {}, 1, ready);
        add_up(how, w1, dh_, batch_.x, in_, ready);
    }

private:
    /// gradient i (m, n) of the outer products of d (rows, m) and x (rows, n); no x stands for ones. Rows come from the last on, and
    /// what is final is reported meanwhile if there are slices; the last report is without bounds.
    template <class Ready>
    void add_up(pass<E> how, std::size_t i, std::span<E const> d, std::span<E const> x, std::size_t n,
                Ready const& ready) {
        std::size_t const m = gradient_[i].size() / n;
        [[maybe_unused]] std::size_t end = gradient_[i].size();
        for (std::size_t a = m; a-- > 0;) {
            std::span<E> const row = gradient_[i].subspan(a * n, n);
            if (!how.accumulate) std::fill(row.begin(), row.end(), E(0));
            for (std::size_t r = 0; r < batch_.rows; ++r)
                for (std::size_t b = 0; b < n; ++b) row[b] += d[r * m + a] * (x.empty() ? E(1) : x[r * n + b]);
            if constexpr (requires { ready(i, end, end); })  // a test's own may not take ranges
                for (; slice != 0 && end > a * n + slice; end -= slice) ready(i, end - slice, slice);
        }
        ready(i);
    }

    std::size_t in_, hidden_, out_;
    std::vector<std::vector<E>> own_;
    std::vector<std::span<E>> value_, gradient_;
    std::shared_ptr<void> owner_;
    regression<E> batch_;
    std::vector<E> h_, d_, dh_;
};

/// A task that no model of this shape solves: training goes on for as long as one likes.
template <Element E>
struct task_data {
    std::size_t in, out, rows;
    std::vector<E> x, y;

    task_data(std::size_t in_width, std::size_t out_width, std::size_t count)
        : in(in_width), out(out_width), rows(count), x(count * in_width), y(count * out_width) {
        random_stream const inputs(1, random_use::user, 0), noise(1, random_use::user, 1);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = inputs.at(i).symmetric<E>();
        for (std::size_t r = 0; r < rows; ++r)
            for (std::size_t o = 0; o < out; ++o)
                y[r * out + o] = static_cast<E>(std::sin(3.0 * static_cast<double>(x[r * in + o % in]))) +
                                 noise.at(r * out + o).symmetric<E>() / E(4);
    }
    /// Rows [begin, end), which lie in one piece.
    [[nodiscard]] regression<E> batch(std::size_t begin, std::size_t end) const noexcept {
        return {std::span<E const>(x).subspan(begin * in, (end - begin) * in),
                std::span<E const>(y).subspan(begin * out, (end - begin) * out), end - begin};
    }
};

}  // namespace ddp::test
