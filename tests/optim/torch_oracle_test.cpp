// The library's optimizers and schedules against PyTorch's and timm's, as tests/oracle/optimizers.py has written them down.
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/schedule.hpp>
#include <ddp/train/reduce_on_plateau.hpp>

#include "optim/textbook.hpp"
#include "support/catch.hpp"

namespace {

struct record_line {
    std::uint64_t update;
    std::string what;
    std::vector<double> numbers;
};

/// The record, by case; the path is from tests/CMakeLists.txt.
std::map<std::string, std::vector<record_line>> read_record() {
    std::ifstream file(DDP_TEST_ORACLE);
    std::string line;
    std::getline(file, line);
    REQUIRE(line == "case,update,what,numbers");
    std::map<std::string, std::vector<record_line>> record;
    while (std::getline(file, line)) {
        std::istringstream fields(line);
        std::string name, update, what, number;
        std::getline(fields, name, ',');
        std::getline(fields, update, ',');
        std::getline(fields, what, ',');
        std::vector<double> numbers;
        while (std::getline(fields, number, ',')) numbers.push_back(std::stod(number));
        record[name].push_back({std::stoull(update), what, numbers});
    }
    return record;
}

/// How many cases of the record are about this.
std::size_t cases_of(std::map<std::string, std::vector<record_line>> const& record, std::string const& what) {
    std::size_t count = 0;
    for (auto const& [name, lines] : record) count += lines.front().what == what ? 1 : 0;
    return count;
}

/// A (w - c), added from left to right.
std::vector<double> gradient_at(std::vector<double> const& w) {
    constexpr double a[4][4] = {{4, 1, 0, -1}, {1, 3, 1, 0}, {0, 1, 2, 1}, {-1, 0, 1, 5}};
    constexpr double c[4] = {1, -2, 3, -1};
    std::vector<double> result(4);
    for (std::size_t i = 0; i < 4; ++i)
        for (std::size_t j = 0; j < 4; ++j) result[i] += a[i][j] * (w[j] - c[j]);
    return result;
}

double norm_of(std::vector<double> const& v) {
    double squares = 0;
    for (double const x : v) squares += x * x;
    return std::sqrt(squares);
}

constexpr double tolerance = 1e-10;  // of each number x: tolerance * (1 + |x|)

/// Follows one case for as many updates as the record has.
void require_as_torch(ddp::any_optimizer const& optimizer, std::vector<record_line> const& lines) {
    optimizer.validate();
    test::stepped_range<double> range(std::vector<double>(4), optimizer.slot_count());
    std::map<std::string, std::vector<double> const*> found{{"value", &range.value}};
    auto const names = optimizer.slot_names();
    for (std::size_t k = 0; k < names.size(); ++k)  // sgd's own name is shorter
        found[names[k] == std::string("momentum") ? "momentum_buffer" : names[k]] = &range.slots[k];

    std::uint64_t step = 0;
    std::size_t shown = 0;
    for (auto const& [update, what, numbers] : lines) {
        for (; step < update; ++step) {
            auto gradient = gradient_at(range.value);
            ddp::step_info at{.step = step + 1, .learning_rate = optimizer.learning_rate()};
            if (optimizer.needs_norms()) {
                std::vector<std::span<double>> const slots(range.slots.begin(), range.slots.end());
                optimizer.prepare<double>(at, gradient, range.value, slots);
                at.value_norm = norm_of(range.value);
                at.gradient_norm = norm_of(gradient);
            }
            range.step(optimizer, at, gradient);
        }
        CAPTURE(update, what);
        REQUIRE(found.count(what) == 1);
        REQUIRE(numbers.size() == 4);
        REQUIRE(test::distance(*found[what], numbers) < tolerance);
        if (update == 100) ++shown;
    }
    REQUIRE(shown == found.size());  // after 100 updates, the values and every slot
}

}  // namespace

TEST_CASE("100 updates of every optimizer are PyTorch's, or timm's", "[optim][oracle]") {
    std::pair<char const*, ddp::any_optimizer> const cases[] = {
        {"sgd", ddp::sgd{.lr = 0.05}},
        {"sgd_momentum", ddp::sgd{.lr = 0.02, .momentum = 0.9, .weight_decay = 0.01}},
        {"sgd_nesterov", ddp::sgd{.lr = 0.02, .momentum = 0.8, .weight_decay = 0.02, .nesterov = true}},
        {"adam", ddp::adam{.lr = 0.05}},
        {"adam_decay", ddp::adam{.lr = 0.03, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1}},
        {"adamw", ddp::adamw{.lr = 0.05, .weight_decay = 0.2}},
        {"rmsprop", ddp::rmsprop{.lr = 0.02}},
        {"rmsprop_decay", ddp::rmsprop{.lr = 0.02, .alpha = 0.9, .eps = 1e-4, .weight_decay = 0.1}},
        {"rmsprop_momentum", ddp::rmsprop{.lr = 0.01, .alpha = 0.95, .momentum = 0.7}},
        {"rmsprop_centered", ddp::rmsprop{.lr = 0.01, .alpha = 0.95, .centered = true}},
        {"rmsprop_all",
         ddp::rmsprop{.lr = 0.005, .alpha = 0.9, .eps = 1e-3, .weight_decay = 0.05, .momentum = 0.6, .centered = true}},
        {"adagrad", ddp::adagrad{.lr = 0.5}},
        {"adagrad_decay", ddp::adagrad{.lr = 0.5, .lr_decay = 0.05, .eps = 1e-6, .weight_decay = 0.1}},
        {"lion", ddp::lion{.lr = 0.013}},
        {"lion_decay", ddp::lion{.lr = 0.021, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.3}},
        {"lamb", ddp::lamb{.lr = 0.03, .weight_decay = 0}},
        {"lamb_decay", ddp::lamb{.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.1}},
        {"lars", ddp::lars{.lr = 0.3, .trust = 0.01}},
        {"lars_decay", ddp::lars{.lr = 0.5, .momentum = 0.6, .weight_decay = 0.2, .trust = 0.05, .eps = 0.1}},
    };
    auto const record = read_record();
    REQUIRE(cases_of(record, "value") == std::size(cases));
    for (auto const& [name, optimizer] : cases) {
        CAPTURE(name);
        REQUIRE(record.count(name) == 1);
        require_as_torch(optimizer, record.at(name));
    }
}

TEST_CASE("60 factors of every schedule are PyTorch's", "[optim][oracle]") {
    std::pair<char const*, ddp::schedule> const cases[] = {
        {"linear", ddp::linear_warmup{.steps = 20, .from = 0.25}},
        {"step", ddp::step_decay{.every = 15, .factor = 0.6}},
        {"cosine", ddp::cosine_decay{.steps = 59, .floor = 0.1}},
        {"polynomial", ddp::polynomial_decay{.steps = 40, .power = 1}},
        {"polynomial_cubic", ddp::polynomial_decay{.steps = 50, .power = 3}},
        {"exponential", ddp::exponential_decay{.factor = 0.95}},
        {"one_cycle", ddp::one_cycle{.steps = 60}},
        {"one_cycle_late", ddp::one_cycle{.steps = 60, .initial = 0.25, .final = 0.005, .rise = 0.71}},
    };
    auto const record = read_record();
    REQUIRE(cases_of(record, "factor") == std::size(cases));
    for (auto const& [name, schedule] : cases) {
        CAPTURE(name);
        REQUIRE(record.count(name) == 1);
        REQUIRE(record.at(name).size() == 60);
        for (auto const& [update, what, numbers] : record.at(name)) {
            CAPTURE(update);
            REQUIRE(what == "factor");
            REQUIRE(std::abs(schedule.factor(update) - numbers.at(0)) < tolerance);
        }
    }
}

TEST_CASE("a rate falls with a metric as PyTorch's ReduceLROnPlateau lowers it", "[optim][train][oracle]") {
    std::pair<char const*, ddp::reduce_on_plateau_options> const cases[] = {
        {"plateau_patience", {.patience = 1}},
        {"plateau_nan", {.patience = 0}},
        {"plateau_cooldown", {.patience = 0, .cooldown = 2}},
        {"plateau_relative", {.patience = 0, .threshold = 0.1}},
        {"plateau_absolute", {.patience = 0, .threshold = 0.5, .relative = false}},
        {"plateau_higher", {.patience = 0, .threshold = 0.1, .better = ddp::better::higher}},
        {"plateau_floor", {.factor = 0.5, .patience = 0, .floor = 0.2}},
        {"plateau_usual", {}},
        {"plateau_noisy", {.factor = 0.7, .patience = 2, .threshold = 0.02, .cooldown = 3, .floor = 0.1}},
        {"plateau_noisy_higher",
         {.factor = 0.5, .patience = 3, .threshold = 0.1, .relative = false, .better = ddp::better::higher}},
    };
    auto const record = read_record();
    REQUIRE(cases_of(record, "plateau") == std::size(cases));
    for (auto const& [name, options] : cases) {
        CAPTURE(name);
        REQUIRE(record.count(name) == 1);
        ddp::reduce_on_plateau plateau(options);
        for (auto const& [update, what, numbers] : record.at(name)) {
            CAPTURE(update);
            REQUIRE((what == "plateau" && numbers.size() == 2));
            REQUIRE(plateau.update(numbers[0]) == numbers[1]);
            REQUIRE(plateau.updates() == update);
        }
        REQUIRE(plateau.factor() < 1);
    }
}
