/// \file
/// A plot of bandwidth over size, as SVG: both axes logarithmic, one line for each series.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "results.hpp"

namespace ddp_perf {

namespace detail {

inline std::string escaped(std::string_view words) {
    std::string out;
    for (char const c : words) {
        if (c == '&')
            out += "&amp;";
        else if (c == '<')
            out += "&lt;";
        else
            out += c;
    }
    return out;
}

/// 65536: "64 KiB".
inline std::string size_label(int power_of_two) {
    constexpr std::array<char const*, 5> units{"B", "KiB", "MiB", "GiB", "TiB"};
    auto const unit = static_cast<std::size_t>(power_of_two / 10);
    return text("%d %s", 1 << power_of_two % 10, units[std::min<std::size_t>(unit, 4)]);
}

}  // namespace detail

[[nodiscard]] inline std::string plot(std::string const& title, std::vector<series> const& lines) {
    constexpr double left = 70, right = 700, top = 50, bottom = 430;
    constexpr std::array<char const*, 8> colors{"#1f5fa8", "#d1495b", "#2e8b57", "#e08e0b",
                                                "#7a4fa3", "#17838f", "#8c564b", "#666666"};
    double least_x = 1e300, most_x = 0, least_y = 1e300, most_y = 0;
    for (series const& line : lines)
        for (auto const& [x, y] : line.points) {
            if (y <= 0) continue;
            least_x = std::min(least_x, x);
            most_x = std::max(most_x, x);
            least_y = std::min(least_y, y);
            most_y = std::max(most_y, y);
        }
    if (most_x == 0) least_x = most_x = least_y = most_y = 1;  // nothing to show but axes
    // Whole powers of two and of ten.
    double const x0 = std::floor(std::log2(least_x)), x1 = std::max(x0 + 1, std::ceil(std::log2(most_x)));
    double const y0 = std::floor(std::log10(least_y)), y1 = std::max(y0 + 1, std::ceil(std::log10(most_y)));
    auto const at_x = [&](double x) { return left + (std::log2(x) - x0) / (x1 - x0) * (right - left); };
    auto const at_y = [&](double y) { return bottom - (std::log10(y) - y0) / (y1 - y0) * (bottom - top); };

    std::string svg =
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 500\" width=\"960\" height=\"500\" "
        "font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"960\" height=\"500\" fill=\"white\"/>\n";
    auto const rule = [&](double xa, double ya, double xb, double yb, char const* color) {
        svg += text("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", xa, ya, xb, yb, color);
    };
    auto const label = [&](double x, double y, char const* anchor, std::string const& words, char const* more = "") {
        svg += text("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>", x, y, anchor, more) + detail::escaped(words) +
               "</text>\n";
    };
    label(left, 28, "start", title, " font-size=\"16\"");
    int step = 1;  // powers of two from one label to the next, of which there are 10 at most
    while (x1 - x0 > 9 * step) step *= 2;
    for (int p = static_cast<int>(x0); p <= static_cast<int>(x1); p += step) {
        double const x = at_x(std::exp2(p));
        rule(x, top, x, bottom, "#dddddd");
        label(x, bottom + 18, "middle", detail::size_label(p));
    }
    for (int p = static_cast<int>(y0); p <= static_cast<int>(y1); ++p)
        for (int digit = 1; digit <= (p < static_cast<int>(y1) ? 9 : 1); ++digit) {
            double const y = at_y(digit * std::pow(10.0, p));
            rule(left, y, right, y, digit == 1 ? "#bbbbbb" : "#eeeeee");
            if (digit == 1) label(left - 8, y + 4, "end", text("%g", std::pow(10.0, p)));
        }
    label((left + right) / 2, bottom + 44, "middle", "size");
    label(20, (top + bottom) / 2, "middle", "bus bandwidth, GB/s",
          text(" transform=\"rotate(-90 20 %.0f)\"", (top + bottom) / 2).c_str());

    for (std::size_t i = 0; i < lines.size(); ++i) {
        char const* const color = colors[i % colors.size()];
        std::string path, dots;
        for (auto const& [x, y] : lines[i].points) {
            if (y <= 0) continue;
            path += text("%.1f,%.1f ", at_x(x), at_y(y));
            dots += text("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", at_x(x), at_y(y), color);
        }
        // Beyond the palette, lines are dashed.
        svg += text("<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s points=\"", color,
                    i < colors.size() ? "" : " stroke-dasharray=\"6 4\"");
        svg.append(path).append("\"/>\n").append(dots);
        double const y = top + 10 + 20 * static_cast<double>(i);
        svg += text("<rect x=\"%.1f\" y=\"%.1f\" width=\"14\" height=\"4\" fill=\"%s\"/>\n", right + 16, y - 6, color);
        label(right + 36, y, "start", lines[i].label);
    }
    return svg + "</svg>\n";
}

}  // namespace ddp_perf
