/// \file
/// frame_news: what a framed transport knows about each rank, directly or through others, and what it forwards.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/transport/framed/frame_inbox.hpp>
#include <ddp/transport/framed/frame_losses.hpp>

namespace ddp {

/// Part of framed. A connection that fails between two living ranks must not look like the death of one: ranks report
/// to each other which ranks they have lost, and a rank that still reaches both ends forwards their records.
template <class Link>
class frame_news {
public:
    /// `links`: by rank, null at `rank`; filled later, and alive as long as this.
    frame_news(int rank, std::vector<Link*> const& links)
        : rank_(rank), links_(links), reports_(links.size()), losses_(static_cast<int>(links.size())) {}

    [[nodiscard]] std::span<report const> reports() const noexcept { return reports_; }
    [[nodiscard]] report& of(int rank) noexcept { return reports_[static_cast<std::size_t>(rank)]; }
    [[nodiscard]] report const& of(int rank) const noexcept { return reports_[static_cast<std::size_t>(rank)]; }
    /// A report to be changed; have_changed() is then true.
    [[nodiscard]] report& change(int rank) noexcept {
        changed_ = true;
        return of(rank);
    }
    /// Whether a report has changed since the last call.
    [[nodiscard]] bool have_changed() noexcept { return std::exchange(changed_, false); }

    /// Processes what a peer has reported about itself and others. Returns false for a rank that does not exist, and
    /// for a record that is not of the rank it is attributed to. Throws std::bad_alloc if there is no memory to forward
    /// it.
    [[nodiscard]] bool hear(Link& l) {
        if (failure record; l.in.take_record(record)) {
            if (!is_of(record, l.peer)) return false;
            learn(l.peer, record);
        }
        for (word_of_peer const& word : l.in.take_words()) {
            int const subject = word.subject < reports_.size() ? static_cast<int>(word.subject) : -1;
            if (subject < 0 || subject == l.peer || (word.record && !is_of(*word.record, subject))) return false;
            if (word.record) {
                if (subject != rank_) learn(subject, *word.record);
            } else if (losses_.note(l.peer, subject)) {
                pass_on(subject, l.peer);
                pass_on(l.peer, subject);
                confirm(subject);
            }
        }
        return true;
    }
    /// Tells all ranks which ones this rank no longer reaches, so that a rank that reaches both forwards records.
    void share_losses() {
        for (Link* const l : links_) {
            if (l == nullptr) continue;
            bool const lost = l->overdue || (l->gone && of(l->peer).is != report::state::left);
            if (!lost || !losses_.note(rank_, l->peer)) continue;
            for (Link* const other : links_)
                if (other != nullptr && other != l && other->out_open) other->out.lost(l->peer);
        }
    }
    /// One rank fewer can be asked: checks every closed rank again.
    void confirm_all() noexcept {
        for (std::size_t rank = 0; rank < reports_.size(); ++rank) confirm(static_cast<int>(rank));
    }

private:
    /// A record names the rank that has published it; a verdict may repeat another rank's record.
    [[nodiscard]] bool is_of(failure const& record, int subject) const noexcept {
        auto const known = [&](int rank) { return rank >= -1 && rank < static_cast<int>(reports_.size()); };
        return known(record.rank) && known(record.peer) && (record.is_verdict || record.rank == subject);
    }
    /// `subject` has published `record`, which arrived from it or through another rank. A verdict is final.
    void learn(int subject, failure const& record) {
        report const& about = of(subject);
        if (about.is == report::state::spoke && (about.record.is_verdict || !record.is_verdict)) return;
        change(subject) = {report::state::spoke, record};
        bool const accuses = record.kind == failure_kind::closed || record.kind == failure_kind::silent;
        if (accuses && record.rank >= 0 && record.peer >= 0 && losses_.note(record.rank, record.peer)) {
            pass_on(record.rank, record.peer);
            pass_on(record.peer, record.rank);
            confirm(record.peer);  // now, because a later report of this loss is no news
        }
        for (Link const* const l : links_)
            if (l != nullptr && losses_.severed(subject, l->peer)) pass_on(subject, l->peer);
    }
    /// Forwards the record of `subject` to `to`, which it may not reach otherwise.
    void pass_on(int subject, int to) {
        report const& about = of(subject);
        if (subject == to || subject == rank_ || to == rank_ || about.is != report::state::spoke) return;
        Link& l = *links_[static_cast<std::size_t>(to)];
        if (l.out_open) l.out.relay(subject, about.record);
    }
    /// A closed rank is dead if all ranks that this one is still connected to have lost it too. Otherwise its record
    /// may still arrive.
    void confirm(int rank) noexcept {
        report& about = of(rank);
        if (about.is != report::state::closed || about.confirmed) return;
        for (Link const* const l : links_)
            if (l != nullptr && l->peer != rank && !l->gone && !losses_.has_lost(l->peer, rank)) return;
        about.confirmed = changed_ = true;
    }

    int rank_;
    std::vector<Link*> const& links_;
    std::vector<report> reports_;
    frame_losses losses_;
    bool changed_ = false;
};

}  // namespace ddp
