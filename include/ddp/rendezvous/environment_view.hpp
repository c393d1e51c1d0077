/// \file
/// environment_view: variables of the environment, read as text and as numbers, with errors that name them.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

/// A variable's value by its name.
using environment_reader = function_ref<std::optional<std::string>(std::string const&)>;

/// This process's own environment.
[[nodiscard]] std::optional<std::string> environment_variable(std::string const& name);

/// The text as a whole decimal number in [least, most]; otherwise throws environment_error, which names the variable,
/// its value and `meaning`.
[[nodiscard]] int environment_number(std::string_view name, std::string_view text, int least, int most,
                                     std::string_view meaning);

/// The variables of one environment.
class environment_view {
public:
    explicit environment_view(environment_reader get) : get_(get) {}

    [[nodiscard]] std::optional<std::string> text(std::string_view name) const { return get_(std::string(name)); }
    [[nodiscard]] bool has(std::string_view name) const { return text(name).has_value(); }
    [[nodiscard]] std::optional<int> number(std::string_view name, int least, int most,
                                            std::string_view meaning) const {
        auto const value = text(name);
        if (!value) return std::nullopt;
        return environment_number(name, *value, least, most, meaning);
    }
    /// The same for a variable that is known to be set.
    [[nodiscard]] std::string known(std::string_view name) const { return text(name).value_or(""); }
    [[nodiscard]] int known_number(std::string_view name, int least, int most, std::string_view meaning) const {
        return environment_number(name, known(name), least, most, meaning);
    }
    /// The first of these that is set, "" if none is.
    [[nodiscard]] std::string_view first_of(std::initializer_list<std::string_view> names) const {
        for (std::string_view const name : names)
            if (has(name)) return name;
        return {};
    }
    /// "NAME=value" for each of them that is set.
    [[nodiscard]] std::string list(std::initializer_list<std::string_view> names) const {
        std::string all;
        for (std::string_view const name : names)
            if (auto const value = text(name))
                all += concat({all.empty() ? "" : " ", name, "=", printable(std::string_view(*value).substr(0, 80))});
        return all;
    }

private:
    environment_reader get_;
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/environment_view.ipp>
#endif
