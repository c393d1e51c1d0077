/// \file
/// What was measured: as a table, as JSON, and read back from either kind of JSON that ddp-perf prints.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/version.hpp>

#include "compiler.hpp"
#include "measure.hpp"
#include "options.hpp"

namespace ddp_perf {

/// One size.
struct row {
    std::size_t bytes = 0, count = 0;
    std::string algorithm = {};
    statistics seconds = {};
    double bus_factor = 1;
    std::optional<std::size_t> wrong = {};  ///< elements, over all ranks; nothing: not checked

    [[nodiscard]] double algorithm_bandwidth() const {
        return seconds.median > 0 ? static_cast<double>(bytes) / seconds.median * 1e-9 : 0;
    }
    [[nodiscard]] double bus_bandwidth() const { return bus_factor * algorithm_bandwidth(); }
};

/// All sizes.
struct results {
    std::string collective, transport, messages, algorithm, impl, net;
    int ranks = 1;
    bool dirty = false;
    std::string mpi = {}, mpi_settings = {};  ///< over MPI: the library, and what is set of the ways that it may take
    std::optional<double> startup = {};       ///< with MODE=startup: seconds; no rows
    std::vector<row> rows = {};
};

template <class... V>
[[nodiscard]] std::string text(char const* format, V... values) {
    char line[512];
    std::snprintf(line, sizeof line, format, values...);
    return line;
}
[[nodiscard]] inline std::string version_text() {
    return text("%d.%d.%d", ddp::version_major, ddp::version_minor, ddp::version_patch);
}

[[nodiscard]] inline std::string table_head(results const& of, settings const& with) {
    std::string const much =
        with.iterations != 0 ? text("%zu repetitions", with.iterations) : text("%g s a size", with.budget);
    return "# ddp-perf " + version_text() + ": " + of.collective + (of.collective == "barrier" ? "" : " of float") +
           ", " + std::to_string(of.ranks) + (of.ranks == 1 ? " rank" : " ranks") + " over " + of.transport +
           (of.messages == "unknown" ? "" : ", messages through " + of.messages) + "; " + much +
           (of.dirty ? "; dirty, the time of rewriting subtracted" : "") + '\n' +
           text("%12s %12s  %-18s %12s %9s %9s %12s %12s %6s %6s\n", "bytes", "count", "algorithm", "median us",
                "alg GB/s", "bus GB/s", "p10 us", "p90 us", "reps", "wrong");
}
[[nodiscard]] inline std::string table_line(row const& r) {
    std::string const wrong = r.wrong ? std::to_string(*r.wrong) : "-";
    return text("%12zu %12zu  %-18s %12.2f %9.3f %9.3f %12.2f %12.2f %6zu %6s\n", r.bytes, r.count, r.algorithm.c_str(),
                1e6 * r.seconds.median, r.algorithm_bandwidth(), r.bus_bandwidth(), 1e6 * r.seconds.p10,
                1e6 * r.seconds.p90, r.seconds.samples, wrong.c_str());
}

[[nodiscard]] inline std::string json_text(std::string_view word) {
    std::string in = "\"";
    for (char const c : word) {
        if (c == '"' || c == '\\') in += '\\';
        if (static_cast<unsigned char>(c) >= 0x20) in += c;
    }
    return in + '"';
}

/// The keys that lines of --candidate and rows of --json share.
[[nodiscard]] inline std::string shared_fields(results const& of, row const& r) {
    return "\"bench\":" + json_text(of.collective) + ",\"net\":" + json_text(of.net) +
           ",\"impl\":" + json_text(of.impl) +
           text(",\"n\":%d,\"bytes\":%zu,\"med_us\":%.3f,\"p10_us\":%.3f,\"p90_us\":%.3f", of.ranks, r.bytes,
                1e6 * r.seconds.median, 1e6 * r.seconds.p10, 1e6 * r.seconds.p90) +
           text(",\"mean_us\":%.3f,\"min_us\":%.3f,\"reps\":%zu", 1e6 * r.seconds.mean, 1e6 * r.seconds.least,
                r.seconds.samples);
}
[[nodiscard]] inline std::string candidate_line(results const& of, row const& r) {
    return '{' + shared_fields(of, r) + ",\"ok\":" + (r.wrong.value_or(0) == 0 ? "true" : "false") + "}\n";
}

[[nodiscard]] inline std::string to_json(results const& of) {
    std::string more;
    if (!of.mpi.empty()) more += ",\"mpi\":" + json_text(of.mpi) + ",\"mpi_settings\":" + json_text(of.mpi_settings);
    if (of.startup) more += text(",\"startup_s\":%.3f", *of.startup);
    std::string all = "{\"tool\":\"ddp-perf\",\"version\":" + json_text(version_text()) +
                      ",\"compiler\":" + json_text(compiler) + ",\"collective\":" + json_text(of.collective) +
                      ",\"transport\":" + json_text(of.transport) + ",\"messages\":" + json_text(of.messages) +
                      ",\"algorithm\":" + json_text(of.algorithm) +
                      text(",\"ranks\":%d,\"element\":\"float\",\"dirty\":%s", of.ranks, of.dirty ? "true" : "false") +
                      more + ",\n \"rows\":[\n";
    for (std::size_t i = 0; i < of.rows.size(); ++i) {
        row const& r = of.rows[i];
        all += "  {" + shared_fields(of, r) + text(",\"count\":%zu,\"algorithm\":", r.count) + json_text(r.algorithm) +
               text(",\"alg_GBps\":%.6g,\"bus_GBps\":%.6g,\"wrong\":", r.algorithm_bandwidth(), r.bus_bandwidth()) +
               (r.wrong ? std::to_string(*r.wrong) : "null") + (i + 1 < of.rows.size() ? "},\n" : "}\n");
    }
    return all + " ]}\n";
}

/// Points of a line in the plot: GB/s over bytes.
struct series {
    std::string label;
    std::vector<std::pair<double, double>> points;
};

namespace detail {

/// The value of `key` in a flat JSON object, without quotes. Nothing: there is none.
inline std::optional<std::string> field(std::string_view object, std::string const& key) {
    auto at = object.find('"' + key + '"');
    if (at == std::string_view::npos) return std::nullopt;
    at = object.find_first_not_of(" \t:", at + key.size() + 2);
    if (at == std::string_view::npos) return std::nullopt;
    bool const is_text = object[at] == '"';
    if (is_text) ++at;
    auto const end = object.find_first_of(is_text ? "\"" : ",} \n", at);
    return std::string(object.substr(at, end == std::string_view::npos ? end : end - at));
}

}  // namespace detail

/// The rows of a file that are about the same collective between as many ranks: one series for each implementation
/// and net. Flat objects that have bytes and med_us are rows, whatever is around them, so files of --json and lines of
/// --candidate are both understood. Of several rows about one size, the median counts.
[[nodiscard]] inline std::vector<series> read_series(std::string const& path, std::string const& collective, int ranks,
                                                     double bus_factor) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw usage_problem("--beside " + path + " cannot be read");
    std::string const all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    std::map<std::string, std::map<double, std::vector<double>>> found;
    for (std::size_t end = all.find('}'); end != std::string::npos; end = all.find('}', end + 1)) {
        auto const begin = all.rfind('{', end);
        if (begin == std::string::npos) continue;
        std::string_view const object = std::string_view(all).substr(begin, end + 1 - begin);
        auto const bytes = detail::field(object, "bytes"), us = detail::field(object, "med_us");
        if (!bytes || !us || detail::field(object, "bench").value_or("") != collective ||
            detail::field(object, "n").value_or("") != std::to_string(ranks))
            continue;
        double const size = std::strtod(bytes->c_str(), nullptr), time = std::strtod(us->c_str(), nullptr);
        if (size <= 0 || time <= 0) continue;
        std::string const net = detail::field(object, "net").value_or("");
        std::string const label = detail::field(object, "impl").value_or("other") + (net.empty() ? "" : ", " + net);
        found[label][size].push_back(bus_factor * size / time * 1e-3);
    }
    if (found.empty())
        throw usage_problem("--beside " + path + " has no results of " + collective + " between " +
                            std::to_string(ranks) + " ranks");
    std::vector<series> lines;
    for (auto& [label, sizes] : found) {
        series line{label, {}};
        for (auto& [size, speeds] : sizes) {
            std::sort(speeds.begin(), speeds.end());
            line.points.emplace_back(size, speeds[speeds.size() / 2]);
        }
        lines.push_back(line);
    }
    return lines;
}

/// Writes all of a file or throws.
inline void write_file(std::string const& path, std::string const& content) {
    std::ofstream file(path, std::ios::binary);
    file << content;
    file.close();
    if (!file) throw std::runtime_error(path + " cannot be written");
}

}  // namespace ddp_perf
