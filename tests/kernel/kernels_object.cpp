// Every kernel with arithmetic, but those of nn/, for float and double (and some for integers), in one object file for no_fma.sh to
// disassemble; never linked.
#include <cstddef>
#include <cstdint>
#include <span>

#include <ddp/exchange/compression.hpp>
#include <ddp/exchange/int8_groups.hpp>
#include <ddp/exchange/sixteen_bit.hpp>
#include <ddp/exchange/thin_matrices.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/kernel/norm.hpp>
#include <ddp/kernel/roots.hpp>
#include <ddp/kernel/scale.hpp>
#include <ddp/kernel/sum.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/schedule.hpp>
#include <ddp/strategy/loose.hpp>
#include <ddp/strategy/outer_step.hpp>
#include <ddp/strategy/stale_synchronous.hpp>

template void ddp::sum_tree(std::span<float>, std::span<float const* const>);
template void ddp::sum_tree(std::span<double>, std::span<double const* const>);
template void ddp::add(std::span<float>, std::span<float const>, std::span<float const>);
template void ddp::add(std::span<double>, std::span<double const>, std::span<double const>);
template void ddp::scale(std::span<float>, float);
template void ddp::scale(std::span<double>, double);
template void ddp::combine_tree<ddp::product>(std::span<float>, std::span<float const* const>);
template void ddp::combine_tree<ddp::product>(std::span<double>, std::span<double const* const>);
template void ddp::combine_tree<ddp::minimum>(std::span<float>, std::span<float const* const>);
template void ddp::combine_tree<ddp::maximum>(std::span<double>, std::span<double const* const>);
template void ddp::combine_tree<ddp::sum>(std::span<std::int32_t>, std::span<std::int32_t const* const>);
template void ddp::combine_tree<ddp::sum>(std::span<std::uint64_t>, std::span<std::uint64_t const* const>);
template void ddp::combine_tree<ddp::maximum>(std::span<std::int64_t>, std::span<std::int64_t const* const>);
template void ddp::block_squares(std::span<float const>, std::span<double>);
template void ddp::block_squares(std::span<double const>, std::span<double>);
template void ddp::clip_by_value::apply(std::span<float>) const;
template void ddp::clip_by_value::apply(std::span<double>) const;
template void ddp::any_optimizer::step(ddp::step_info const&, std::span<float const>, std::span<float>,
                                       ddp::slot_spans<float>) const;
template void ddp::any_optimizer::step(ddp::step_info const&, std::span<double const>, std::span<double>,
                                       ddp::slot_spans<double>) const;

template void ddp::detail::kernels::narrow<ddp::bfloat16, float>(float const*, std::uint16_t*, std::size_t);
template void ddp::detail::kernels::widen<ddp::bfloat16, float>(std::uint16_t const*, float*, std::size_t);
template void ddp::detail::kernels::narrow<ddp::half, float>(float const*, std::uint16_t*, std::size_t);
template void ddp::detail::kernels::widen<ddp::half, float>(std::uint16_t const*, float*, std::size_t);
template void ddp::detail::kernels::to_whole(float const*, std::int8_t*, std::size_t, float);
template void ddp::detail::kernels::from_whole(std::int8_t const*, float*, std::size_t, float);
template void ddp::detail::kernels::contribution(float const*, float, float*, std::size_t);
template void ddp::detail::kernels::contribution(float const*, float, float const*, float*, std::size_t);
template void ddp::detail::kernels::leave_out(float const*, float const*, float*, std::size_t);
template void ddp::detail::kernels::add_squares(float const*, float const*, std::size_t, double*);
template void ddp::detail::kernels::assign_times(float*, float const*, std::size_t, float);
template void ddp::detail::kernels::add_times(float*, float const*, float const*, std::size_t, float);
template void ddp::detail::kernels::times_thin(float const*, float const*, float*, std::size_t, std::size_t,
                                               std::size_t);
template void ddp::detail::kernels::transposed_times(float const*, float const*, float*, std::size_t, std::size_t,
                                                     std::size_t);
template void ddp::detail::kernels::product_of_thin(float const*, float const*, float*, std::size_t, std::size_t,
                                                    std::size_t);
template void ddp::detail::kernels::orthonormalise(float*, std::size_t, std::size_t);
template void ddp::detail::kernels::outer_step(float*, float*, float*, std::size_t, float, float, float, bool);
template void ddp::detail::kernels::elastic_pull(float*, float const*, float*, std::size_t, float);
template void ddp::detail::kernels::what_a_step_did(float const*, float const*, float*, float*, std::size_t, float);
template void ddp::detail::kernels::take_mean_step(float*, float const*, std::size_t, float);
template void ddp::detail::kernels::narrow<ddp::bfloat16, double>(double const*, std::uint16_t*, std::size_t);
template void ddp::detail::kernels::widen<ddp::bfloat16, double>(std::uint16_t const*, double*, std::size_t);
template void ddp::detail::kernels::narrow<ddp::half, double>(double const*, std::uint16_t*, std::size_t);
template void ddp::detail::kernels::widen<ddp::half, double>(std::uint16_t const*, double*, std::size_t);
template void ddp::detail::kernels::to_whole(double const*, std::int8_t*, std::size_t, float);
template void ddp::detail::kernels::from_whole(std::int8_t const*, double*, std::size_t, float);
template void ddp::detail::kernels::contribution(double const*, double, double*, std::size_t);
template void ddp::detail::kernels::contribution(double const*, double, double const*, double*, std::size_t);
template void ddp::detail::kernels::leave_out(double const*, double const*, double*, std::size_t);
template void ddp::detail::kernels::add_squares(double const*, double const*, std::size_t, double*);
template void ddp::detail::kernels::assign_times(double*, double const*, std::size_t, double);
template void ddp::detail::kernels::add_times(double*, double const*, double const*, std::size_t, double);
template void ddp::detail::kernels::times_thin(double const*, double const*, double*, std::size_t, std::size_t,
                                               std::size_t);
template void ddp::detail::kernels::transposed_times(double const*, double const*, double*, std::size_t, std::size_t,
                                                     std::size_t);
template void ddp::detail::kernels::product_of_thin(double const*, double const*, double*, std::size_t, std::size_t,
                                                    std::size_t);
template void ddp::detail::kernels::orthonormalise(double*, std::size_t, std::size_t);
template void ddp::detail::kernels::outer_step(double*, double*, double*, std::size_t, double, double, double, bool);
template void ddp::detail::kernels::elastic_pull(double*, double const*, double*, std::size_t, double);
template void ddp::detail::kernels::what_a_step_did(double const*, double const*, double*, double*, std::size_t,
                                                    double);
template void ddp::detail::kernels::take_mean_step(double*, double const*, std::size_t, double);

bool every_scalar_kernel(ddp::schedule const& schedule, std::span<double const> values, double& out);

bool every_scalar_kernel(ddp::schedule const& schedule, std::span<double const> values, double& out) {
    out = schedule.factor(static_cast<std::uint64_t>(values.size())) + ddp::tree_sum(values);
    return ddp::contraction_is_off();
}
