/// \file
/// What ranks do with buffers: state of a model that is not trained.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/broadcast.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/posted.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/data/safetensors_header.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/rank_sums.hpp>
#include <ddp/transport/any.hpp>

namespace ddp::detail {

/// One line a buffer, for what ranks compare.
[[nodiscard]] inline std::string describe(std::span<model_buffer const> buffers) {
    std::string text;
    for (model_buffer const& b : buffers) text += "buffer '" + b.name + "' " + type_and_shape(b.type, b.shape) + "\n";
    return text;
}

[[nodiscard]] inline std::uint64_t digest_of(std::span<model_buffer const> buffers) noexcept {
    digest all;
    for (model_buffer const& b : buffers) all.add(const_bytes(b.bytes));
    return all.value();
}

/// What buffers held before the passes of a step that may be skipped.
class buffers_before {
public:
    void keep(std::span<model_buffer const> buffers) {
        bytes_.clear();
        for (model_buffer const& b : buffers) bytes_.insert(bytes_.end(), b.bytes.begin(), b.bytes.end());
        kept_ = true;
    }
    void forget() noexcept { kept_ = false; }
    /// Of the same buffers; does nothing if none were kept.
    void put_back(std::span<model_buffer const> buffers) const {
        if (!kept_) return;
        std::size_t at = 0;
        for (model_buffer const& b : buffers) {
            DDP_EXPECTS(b.bytes.size() <= bytes_.size() - at, "the model's buffers have grown within a step");
            if (!b.bytes.empty()) std::memcpy(b.bytes.data(), bytes_.data() + at, b.bytes.size());
            at += b.bytes.size();
        }
    }

private:
    std::vector<std::byte> bytes_;
    bool kept_ = false;
};

/// Whose buffers count: after a step, those of the ranks that had samples in it.
struct buffer_ranks {
    int first = 0;     // the lowest
    int count = 1;     // their number
    bool mine = true;  // this rank is one
};

/// The bytes of rank `root` on every rank. Collective, one broadcast.
template <Transport T>
void broadcast_buffers(communicator<T> const& comm, std::span<model_buffer const> buffers, int root = 0) {
    posted const all(comm, std::vector<std::byte>());
    for (model_buffer const& b : buffers) all->insert(all->end(), b.bytes.begin(), b.bytes.end());
    if (all->empty()) return;
    broadcast(comm, std::span<std::byte>(*all), root);
    std::byte const* from = all->data();
    for (model_buffer const& b : buffers) {
        if (!b.bytes.empty()) std::memcpy(b.bytes.data(), from, b.bytes.size());
        from += b.bytes.size();
    }
}

/// Buffers of float and double become their mean over the ranks `of`, added in double in the canonical order; others become
/// those of the lowest of these ranks.
template <Transport T>
void average_buffers(communicator<T> const& comm, std::span<model_buffer const> buffers, buffer_ranks const& of) {
    posted const sums(comm, std::vector<double>());
    std::vector<model_buffer> others;
    auto const each = [&](auto f) {
        for (model_buffer const& b : buffers) {
            std::size_t const count = b.bytes.size() * 8 / bits_of(b.type);
            for (std::size_t i = 0; b.type == element_type::f32 && i < count; ++i) f(b.bytes.data() + i * 4, float());
            for (std::size_t i = 0; b.type == element_type::f64 && i < count; ++i) f(b.bytes.data() + i * 8, double());
        }
    };
    for (model_buffer const& b : buffers)
        if (b.type != element_type::f32 && b.type != element_type::f64) others.push_back(b);
    each([&](std::byte const* at, auto value) {
        std::memcpy(&value, at, sizeof value);
        sums->push_back(of.mine ? static_cast<double>(value) : 0);
    });
    allreduce(comm, std::span<double>(*sums));
    double const* from = sums->data();
    each([&](std::byte* at, auto value) {
        value = static_cast<decltype(value)>(*from++ / of.count);
        std::memcpy(at, &value, sizeof value);
    });
    broadcast_buffers(comm, std::span<model_buffer const>(others), of.first);
}

/// The trainer's ranks, for a model that adds over them. The model may outlive the trainer, which leaves first.
template <Transport T>
class trainer_sums final : public rank_sums {
public:
    explicit trainer_sums(communicator<T> const& comm) : comm_(comm) {}
    void add(std::span<double> mine) override {
        if (!comm_) return;
        posted const all(*comm_, std::vector<double>(mine.begin(), mine.end()));
        allreduce(*comm_, std::span<double>(*all));
        std::ranges::copy(*all, mine.begin());
    }
    void leave() noexcept { comm_.reset(); }

private:
    std::optional<communicator<T>> comm_;
};

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE void broadcast_buffers(communicator<any_transport> const&, std::span<model_buffer const>, int);
DDP_INSTANTIATE void average_buffers(communicator<any_transport> const&, std::span<model_buffer const>,
                                     buffer_ranks const&);
DDP_INSTANTIATE class trainer_sums<any_transport>;
#endif

}  // namespace ddp::detail
