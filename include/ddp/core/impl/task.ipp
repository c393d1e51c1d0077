/// \file
/// What core/task.hpp declares.
#pragma once

#include <ddp/core/task.hpp>

namespace ddp {

DDP_DECL frame_pool::~frame_pool() {
    for (node*& head : free_)
        while (head != nullptr) ::operator delete(std::exchange(head, head->next));
}

[[gnu::cold]] DDP_DECL void frame_pool::reserve_counted(std::size_t small, std::size_t large_at_once) noexcept {
    for (std::size_t c = 0; c < classes; ++c) {
        if (taken_[c] == 0) continue;
        std::size_t const wanted = bytes_of(c) <= small ? taken_[c] + 1 : std::min(taken_[c], large_at_once);
        for (; made_[c] < wanted; ++made_[c]) {
            void* const fresh = ::operator new(bytes_of(c), std::nothrow);
            if (fresh == nullptr) return;
            free_[c] = ::new (fresh) node{free_[c]};
        }
    }
}

[[gnu::noinline]] DDP_DECL void* frame_pool::allocate(std::size_t bytes) {
    frame_pool* const pool = current();
    std::size_t const total = bytes + sizeof(header);
    void* const raw = pool != nullptr ? pool->take(total) : ::operator new(total);
    header* const h = ::new (raw) header{pool, nullptr};
    return h->frame = h + 1;
}

[[gnu::noinline]] DDP_DECL void frame_pool::deallocate(void* frame, std::size_t bytes) noexcept {
    header* const h = static_cast<header*>(frame) - 1;
    if (h->pool != nullptr)
        h->pool->give(h, bytes + sizeof(header));
    else
        ::operator delete(h);
}

DDP_DECL void* frame_pool::take(std::size_t total) {
    std::size_t const c = class_of(total);
    ++taken_[c];
    if (node* const n = free_[c]) {
        free_[c] = n->next;
        return n;
    }
    void* const fresh = ::operator new(bytes_of(c));
    ++made_[c];
    return fresh;
}

DDP_DECL void frame_pool::give(void* raw, std::size_t total) noexcept {
    std::size_t const c = class_of(total);
    free_[c] = ::new (raw) node{free_[c]};
}

}  // namespace ddp
