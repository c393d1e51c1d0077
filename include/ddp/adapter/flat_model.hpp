/// \file
/// flat_model: a model from somewhere else that keeps its parameters in one vector, and computes loss and gradient in one call.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/kernel/scale.hpp>
#include <ddp/model/model.hpp>

namespace ddp {

/// A part of a flat vector that is a parameter of its own: it has a name in messages and weights files, and may be in a
/// parameter group.
struct flat_part {
    std::string name;                ///< unique within the model
    std::vector<std::size_t> shape;  ///< its product is the number of elements
};

/// A model of another library or of your own program whose parameters are one vector and whose gradient is one vector
/// that is computed all at once:
///
///     std::vector<double> values(n), gradient(n);
///     ddp::flat_model model{values, gradient, [&](batch const& b) { return loss_and_gradient(values, b, gradient); }};
///     ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
///
/// The function computes the mean loss over a batch with the current values, assigns the gradient of that mean to all
/// elements of `gradient`, and returns the loss. The model does the scaling by the batch's weight, the accumulation and the
/// copies: the program's two vectors stay in place, and must not be moved while the model is used. The function is never
/// called with an empty batch.
///
/// Cost    memory for a second gradient; a step adds one pass over the gradient to what an unbound model costs (two copies).
///         Nothing overlaps backward: the whole gradient becomes available at once.
/// Throws  usage_error from the constructor, for spans of different lengths, or parts that do not fill them. A trainer rejects
///         two parts with the same name.
template <Element E, class F>
class flat_model {
public:
    using element = E;

    /// One parameter, called "parameters", with all the elements.
    flat_model(std::span<E> values, std::span<E> gradient, F loss_and_gradient)
        : flat_model(values, gradient, std::move(loss_and_gradient), {{"parameters", {values.size()}}}) {}
    /// One parameter for each part; the parts follow one another from the first element to the last.
    flat_model(std::span<E> values, std::span<E> gradient, F loss_and_gradient, std::vector<flat_part> parts)
        : values_(values),
          gradient_(gradient),
          sums_(values.size()),
          loss_and_gradient_(std::move(loss_and_gradient)),
          parts_(std::move(parts)) {
        DDP_EXPECTS(values.size() == gradient.size(), "flat_model: there are " + std::to_string(values.size()) +
                                                          " values, but " + std::to_string(gradient.size()) +
                                                          " elements of the gradient; they must be as many");
        std::size_t covered = 0;
        for (flat_part const& part : parts_) covered += elements(part);
        DDP_EXPECTS(covered == values.size(), "flat_model: the parts have " + std::to_string(covered) +
                                                  " elements in all, but there are " + std::to_string(values.size()) +
                                                  " values; parts follow each other without gaps");
    }

    [[nodiscard]] std::vector<parameter<E>> parameters() {
        std::vector<parameter<E>> all;
        std::size_t at = 0;
        for (flat_part const& part : parts_) {
            std::size_t const count = elements(part);
            all.push_back({part.name, part.shape, values_.subspan(at, count), std::span(sums_).subspan(at, count)});
            at += count;
        }
        return all;
    }
    template <class Batch>
        requires std::is_invocable_r_v<double, F&, Batch const&>
    double forward(Batch const& batch) {
        return std::invoke(loss_and_gradient_, batch);
    }
    template <class Ready>
    void backward(pass<E> how, Ready const& ready) {
        if (how.accumulate)
            detail::kernels::add_times(sums_.data(), sums_.data(), gradient_.data(), sums_.size(), how.scale);
        else
            detail::kernels::assign_times(sums_.data(), gradient_.data(), sums_.size(), how.scale);
        for (std::size_t i = parts_.size(); i-- > 0;) ready(i);
    }

private:
    static std::size_t elements(flat_part const& part) noexcept {
        std::size_t count = 1;
        for (std::size_t const n : part.shape) count *= n;
        return count;
    }

    std::span<E> values_, gradient_;  // the program's
    std::vector<E> sums_;             // what backward writes
    F loss_and_gradient_;
    std::vector<flat_part> parts_;
};

/// Accepts vectors and arrays of other libraries if std::span does; for others, such as Eigen's, pass
/// std::span(v.data(), n).
template <class V, class G, class F>
flat_model(V&&, G&&, F) -> flat_model<typename decltype(std::span(std::declval<V&>()))::element_type, F>;
template <class V, class G, class F>
flat_model(V&&, G&&, F, std::vector<flat_part>)
    -> flat_model<typename decltype(std::span(std::declval<V&>()))::element_type, F>;

}  // namespace ddp
