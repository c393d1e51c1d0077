/// \file
/// string_map: a few strings by name, sorted by name.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>

namespace ddp {

/// A map from names to texts, such as the metadata of a file or the entries of a checkpoint. It is used like
/// std::map<std::string, std::string>, whose header would add a twentieth to the compile time of ddp.hpp, and is meant
/// for a few dozen entries: adding one is O(n). Iteration is in ascending order of names.
class string_map {
public:
    using value_type = std::pair<std::string, std::string>;

    string_map() = default;
    string_map(std::initializer_list<value_type> entries) {
        for (value_type const& e : entries) emplace(e.first, e.second);
    }

    /// Adds an entry unless there is one with that name already; returns whether it did.
    bool emplace(std::string name, std::string text) {
        auto const at = place(name);
        if (at != entries_.end() && at->first == name) return false;
        entries_.emplace(at, std::move(name), std::move(text));
        return true;
    }
    /// The text of the entry `name`. Throws usage_error if there is none.
    [[nodiscard]] std::string const& at(std::string_view name) const {
        auto const found = place(name);
        DDP_EXPECTS(found != entries_.end() && found->first == name, "there is no entry '" + std::string(name) + "'");
        return found->second;
    }
    /// Whether there is an entry `name`.
    [[nodiscard]] bool contains(std::string_view name) const noexcept {
        auto const found = place(name);
        return found != entries_.end() && found->first == name;
    }
    /// The text of the entry `name`, or an empty text if there is none.
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
