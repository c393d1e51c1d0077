/// \file
/// The memory that a trainer's values and gradients live in, one array each, bucket after bucket.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <span>
#include <utility>

#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>

namespace ddp {

/// Memory for `count` elements, zeroed, on a 64-byte boundary.
template <Element E>
[[nodiscard]] std::shared_ptr<E[]> make_arena(std::size_t count) {
    auto* const raw =
        static_cast<E*>(::operator new(std::max<std::size_t>(1, count) * sizeof(E), std::align_val_t{64}));
    std::fill_n(raw, count, E(0));
    return std::shared_ptr<E[]>(raw, [](E* p) { ::operator delete(p, std::align_val_t{64}); });
}

/// Values and gradients of all parameters, placed by a layout. Copies share the memory. A bound model works in it and keeps
/// it alive.
template <Element E>
class arena {
public:
    arena() = default;
    explicit arena(layout where)
        : layout_(std::move(where)),
          values_(make_arena<E>(layout_.size())),
          gradients_(make_arena<E>(layout_.size())),
          owner_(std::make_shared<std::pair<std::shared_ptr<E[]>, std::shared_ptr<E[]>>>(values_, gradients_)) {}
    /// In memory that the caller provides: bytes(where) of it, zero, on a 64-byte boundary; values, then gradients.
    arena(layout where, std::shared_ptr<std::byte> const& memory)
        : layout_(std::move(where)),
          values_(memory, reinterpret_cast<E*>(memory.get())),
          gradients_(memory, reinterpret_cast<E*>(memory.get() + half_bytes(layout_.size()))),
          owner_(memory) {}
    /// Values and gradients begin on page boundaries.
    [[nodiscard]] static std::size_t bytes(layout const& where) noexcept { return 2 * half_bytes(where.size()); }
    [[nodiscard]] static std::size_t half_bytes(std::size_t elements) noexcept {
        constexpr std::size_t page = 4096;
        return (elements * sizeof(E) + page - 1) / page * page;
    }

    [[nodiscard]] layout const& where() const noexcept { return layout_; }
    [[nodiscard]] std::span<E> values() const noexcept { return {values_.get(), layout_.size()}; }
    [[nodiscard]] std::span<E> gradients() const noexcept { return {gradients_.get(), layout_.size()}; }
    [[nodiscard]] std::span<E> value(std::size_t i) const noexcept {
        return values().subspan(layout_.begin(i), layout_.count(i));
    }
    [[nodiscard]] std::span<E> gradient(std::size_t i) const noexcept {
        return gradients().subspan(layout_.begin(i), layout_.count(i));
    }
    /// What keeps both arrays alive.
    [[nodiscard]] std::shared_ptr<void> const& owner() const noexcept { return owner_; }

    /// Moves `model` and its list of parameters into this arena.
    template <class M>
    void bind(M& model, std::span<parameter<E>> parameters) const {
        storage<E> memory;
        memory.owner = owner_;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            memory.values.push_back(value(i));
            memory.gradients.push_back(gradient(i));
            parameters[i].value = value(i);
            parameters[i].gradient = gradient(i);
        }
        if (layout_.placed() == parameter_placement::contiguous) {
            memory.all_values = values();
            memory.all_gradients = gradients();
        }
        model.bind(std::move(memory));
    }

private:
    layout layout_;
    std::shared_ptr<E[]> values_;
    std::shared_ptr<E[]> gradients_;
    std::shared_ptr<void> owner_;
};

}  // namespace ddp
