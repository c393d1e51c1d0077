/// \file
/// What comm/cores.hpp declares.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include <ddp/comm/cores.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL std::string core_set::text() const {
    std::size_t used = words.size();
    while (used > 0 && words[used - 1] == 0) --used;
    std::string result;
    for (std::size_t i = 0; i < used; ++i) {
        std::array<char, 24> word{};
        std::snprintf(word.data(), word.size(), "%s%llx", i == 0 ? "" : ",", static_cast<unsigned long long>(words[i]));
        result += word.data();
    }
    return result;
}

[[gnu::cold]] DDP_DECL core_set core_set::parse(std::string const& text) {
    core_set result;
    char const* at = text.c_str();
    for (std::uint64_t& word : result.words) {
        char* end = nullptr;
        word = std::strtoull(at, &end, 16);
        if (end == at || *end != ',') break;
        at = end + 1;
    }
    return result;
}

[[gnu::cold]] DDP_DECL core_set cores_of_process() {
    core_set result;
    ::cpu_set_t set;
    CPU_ZERO(&set);
    if (::sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int core = 0; core < std::min(core_set::most, CPU_SETSIZE); ++core)
            if (CPU_ISSET(core, &set)) result.add(core);
        return result;
    }
    long const online = std::clamp<long>(::sysconf(_SC_NPROCESSORS_ONLN), 1, core_set::most);
    for (int core = 0; core < online; ++core) result.add(core);
    return result;
}

/// The first line of a small file; empty where there is none.
[[nodiscard, gnu::cold]] DDP_DECL std::string first_line(std::string const& path) {
    std::array<char, 256> line{};
    if (std::FILE* const file = std::fopen(path.c_str(), "re")) {
        if (std::fgets(line.data(), static_cast<int>(line.size()), file) == nullptr) line[0] = '\0';
        std::fclose(file);
    }
    return line.data();
}

/// The limit of one directory of a control group, in cores; 0: none, or no such directory.
[[nodiscard, gnu::cold]] DDP_DECL double quota_in(std::string const& directory) {
    auto const share = [](char const* quota, char const* period) {
        double const q = std::atof(quota), p = std::atof(period);  // "max" and -1 are no limit
        return q > 0 && p > 0 ? q / p : 0;
    };
    std::string const unified = first_line(directory + "/cpu.max");  // "QUOTA PERIOD", in microseconds
    if (std::size_t const space = unified.find(' '); space != std::string::npos)
        return share(unified.c_str(), unified.c_str() + space);
    return share(first_line(directory + "/cpu.cfs_quota_us").c_str(),
                 first_line(directory + "/cpu.cfs_period_us").c_str());
}

[[gnu::cold]] DDP_DECL double core_quota(std::string const& root) {
    double least = 0;
    std::FILE* const file = std::fopen((root + "/proc/self/cgroup").c_str(), "re");
    if (file == nullptr) return 0;
    std::array<char, 4096> line{};
    while (std::fgets(line.data(), static_cast<int>(line.size()), file) != nullptr) {  // "NUMBER:CONTROLLERS:/PATH"
        std::string_view text = line.data();
        if (!text.empty() && text.back() == '\n') text.remove_suffix(1);
        std::size_t const first = text.find(':'), second = text.find(':', first + 1);
        if (second == std::string_view::npos) continue;
        std::string const controllers = "," + std::string(text.substr(first + 1, second - first - 1)) + ",";
        bool const unified = controllers == ",,";
        if (!unified && controllers.find(",cpu,") == std::string::npos) continue;
        std::string const top = root + (unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu");
        // A container sees its own group as the root of the tree, whatever its path is called outside: what does not exist
        // here is passed over on the way up.
        for (std::string path(text.substr(second + 1));;) {
            while (!path.empty() && path.back() == '/') path.pop_back();
            if (double const limit = quota_in(top + path); limit > 0)
                least = least > 0 ? std::min(least, limit) : limit;
            if (path.empty()) break;
            std::size_t const slash = path.rfind('/');
            path.resize(slash == std::string::npos ? 0 : slash);
        }
    }
    std::fclose(file);
    return least;
}

[[gnu::cold]] DDP_DECL int usable_cores(core_set const& cores, double quota) noexcept {
    int const all = cores.count();
    int const allowed = quota > 0 && quota < all ? static_cast<int>(quota + 0.5) : all;
    return std::max(allowed, 1);
}

}  // namespace ddp::detail
