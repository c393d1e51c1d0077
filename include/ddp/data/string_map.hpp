/// \file
/// string_map: a few texts under names, in the order of the names.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>

namespace ddp {

/// What a file says about itself. As std::map<std::string, std::string>, whose header is a twentieth of what ddp.hpp costs to
/// read; made for some dozens of entries: adding one is O(n).
class string_map {
public:
    using value_type = std::pair<std::string, std::string>;

    string_map() = default;
    string_map(std::initializer_list<value_type> entries) {
        for (value_type const& e : entries) emplace(e.first, e.second);
    }

    /// Adds an entry unless there is one of that name; says whether it did.
    bool emplace(std::string name, std::string text) {
        auto const at = place(name);
        if (at != entries_.end() && at->first == name) return false;
        entries_.emplace(at, std::move(name), std::move(text));
        return true;
    }
    /// Throws usage_error if there is no entry of that name.
    [[nodiscard]] std::string const& at(std::string_view name) const {
        auto const found = place(name);
        DDP_EXPECTS(found != entries_.end() && found->first == name, "there is no entry '" + std::string(name) + "'");
        return found->second;
    }
    [[nodiscard]] bool contains(std::string_view name) const noexcept {
        auto const found = place(name);
        return found != entries_.end() && found->first == name;
    }
    /// An empty text where there is no entry of that name.
    [[nodiscard]] std::string get(std::string_view name) const { return contains(name) ? at(name) : std::string(); }

    [[nodiscard]] auto begin() const noexcept { return entries_.begin(); }
    [[nodiscard]] auto end() const noexcept { return entries_.end(); }
    [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
    [[nodiscard]] bool empty() const noexcept { return entries_.empty(); }
    friend bool operator==(string_map const&, string_map const&) = default;

private:
    [[nodiscard]] std::vector<value_type>::const_iterator place(std::string_view name) const noexcept {
        return std::lower_bound(entries_.begin(), entries_.end(), name,
                                [](value_type const& e, std::string_view n) { return e.first < n; });
    }

    std::vector<value_type> entries_;
};

}  // namespace ddp
