// Every kernel of the library, for float and double (and some for integers), in one object file for no_fma.sh to disassemble; never linked.
#include <cstddef>
#include <cstdint>
#include <span>

#include <ddp/kernel/kernel.hpp>
#include <ddp/kernel/norm.hpp>
#include <ddp/kernel/roots.hpp>
#include <ddp/kernel/sum.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/schedule.hpp>

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

bool every_scalar_kernel(ddp::schedule const& schedule, std::span<double const> values, double& out);

bool every_scalar_kernel(ddp::schedule const& schedule, std::span<double const> values, double& out) {
    out = schedule.factor(static_cast<std::uint64_t>(values.size())) + ddp::tree_sum(values);
    return ddp::contraction_is_off();
}
