/// \file
/// What comm/group.hpp declares, but for what a group does with its scheduler: see scheduler_base.ipp.
#pragma once

#include <string>

#include <ddp/comm/group.hpp>
#include <ddp/core/text.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL std::string operation_info::text() const {
    std::string t = ddp::detail::concat({name, " #", id.index});
    if (*element != '\0') t += ddp::detail::concat({" of ", count, " ", element});
    if (*detail != '\0') t += ddp::detail::concat({" (", detail, ")"});
    if (root >= 0) t += ddp::detail::concat({" with root ", root});
    return t;
}

[[gnu::cold]] DDP_DECL std::string group::words_of(std::uint64_t number) const {
    return recent(number).what.text() + words();
}
[[gnu::cold]] DDP_DECL std::uint64_t group::number_of(identity const& id) const noexcept {
    if (id.group == id_ && id.channel < channel::user + 4)
        for (std::uint64_t n = number_; n > 0 && remembers(n); --n)
            if (recent(n).what.id.channel == channel::user && recent(n).what.id.index == id.index) return n;
    return number_;
}
[[gnu::cold]] DDP_DECL ddp::mark group::mark_of(std::uint64_t number) const noexcept {
    ddp::mark m = brief_mark();
    m.number = number;
    m.fingerprint = recent(number).history;
    m.name = std::string_view(recent(number).what.name);
    try {
        if (!m.name.view().empty()) m.name = std::string_view(words_of(number));
    } catch (...) {  // no memory: only the name is given
    }
    return m;
}

}  // namespace ddp
