// Command lines of the examples: "--name value" or "--name=value" into variables, with an error that names the option.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

class options {
public:
    explicit options(std::string about) : about_(std::move(about)) {}

    template <class V>
    options& add(std::string const& name, V& value, std::string const& help) {
        return add_taker(name, help, [&value, name](std::string const& text) { set(value, text, name); });
    }

    // "--name" alone says yes.
    options& add(std::string const& name, bool& value, std::string const& help) {
        flags_[name] = &value;
        return add_taker(name, help, [](std::string const&) {});
    }

    // A number from `least` to `most`; no other is taken.
    template <class V>
    options& add(std::string const& name, V& value, std::string const& help, std::type_identity_t<V> least,
                 std::type_identity_t<V> most = std::numeric_limits<V>::max()) {
        return add_taker(name, help, [&value, name, least, most](std::string const& text) {
            V number{};
            set(number, text, name);
            if (number < least || number > most) {
                std::ostringstream range;
                range << "--" << name << " takes a number from " << least << " on";
                if (most != std::numeric_limits<V>::max()) range << ", up to " << most;
                throw std::invalid_argument(range.str() + ", not '" + text + "'");
            }
            value = number;
        });
    }

    // Exits after --help, and with 2 after a mistake.
    void parse(int argc, char** argv) const {
        try {
            for (int i = 1; i < argc; ++i) {
                std::string name = argv[i], value;
                if (name == "--help" || name == "-h") {
                    std::printf("%s\n\n%s", about_.c_str(), help_.c_str());
                    std::exit(0);
                }
                if (name.rfind("--", 0) != 0) throw std::invalid_argument("'" + name + "' is no option");
                name.erase(0, 2);
                auto const equals = name.find('=');
                bool const joined = equals != std::string::npos;
                if (joined) {
                    value = name.substr(equals + 1);
                    name.erase(equals);
                }
                auto const taker = takers_.find(name);
                if (taker == takers_.end()) throw std::invalid_argument("there is no option --" + name);
                if (auto const flag = flags_.find(name); flag != flags_.end()) {
                    if (joined) throw std::invalid_argument("--" + name + " takes no value");
                    *flag->second = true;
                    continue;
                }
                if (!joined) {
                    if (++i == argc) throw std::invalid_argument("--" + name + " needs a value");
                    value = argv[i];
                }
                taker->second(value);
            }
        } catch (std::exception const& e) {
            std::fprintf(stderr, "%s\nTry --help.\n", e.what());
            std::exit(2);
        }
    }

    // "512", "64KiB", "1MiB", "1GiB": bytes.
    static std::size_t bytes(std::string const& text, std::string const& name) {
        std::size_t value = 0;
        auto const [end, bad] = std::from_chars(text.data(), text.data() + text.size(), value);
        std::string_view const unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
        int const shift = unit.empty() || unit == "B" ? 0
                          : unit == "KiB"             ? 10
                          : unit == "MiB"             ? 20
                          : unit == "GiB"             ? 30
                                                      : -1;
        if (bad != std::errc{} || shift < 0 || value == 0 || value > (std::size_t{1} << 40) >> shift)
            throw std::invalid_argument("--" + name + " takes a size such as 64KiB or 1MiB, not '" + text + "'");
        return value << shift;
    }

private:
    options& add_taker(std::string const& name, std::string const& help,
                       std::function<void(std::string const&)> taker) {
        help_ += "  --" + name + std::string(name.size() < 14 ? 14 - name.size() : 1, ' ') + help + "\n";
        takers_[name] = std::move(taker);
        return *this;
    }
    template <class V>
    static void set(V& value, std::string const& text, std::string const& name) {
        if constexpr (std::is_same_v<V, std::string>) {
            value = text;
        } else {
            V number{};
            auto const [end, bad] = std::from_chars(text.data(), text.data() + text.size(), number);
            if (bad != std::errc{} || end != text.data() + text.size())
                throw std::invalid_argument("--" + name + " takes a number, not '" + text + "'");
            if constexpr (std::is_floating_point_v<V>)
                if (!std::isfinite(number))
                    throw std::invalid_argument("--" + name + " takes a finite number, not '" + text + "'");
            value = number;
        }
    }

    std::string about_;
    std::string help_;
    std::map<std::string, std::function<void(std::string const&)>> takers_;
    std::map<std::string, bool*> flags_;
};
