// Throws arbitrary lines at what reads the ranks' flight records: a rank that dies may leave anything there. What ddprun
// makes of it has bounds and is for a terminal; a record whose last line was torn off reads as one without that line. Anything
// else, and whatever a sanitizer sees, ends the program.
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "../../tools/ddprun/flight.hpp"
#include "input.hpp"

namespace {

using fuzz::expect;

void sound(ddprun::flight_state const& state) {
    expect(!state.doing.empty() && state.doing.size() < 200, "what a rank did has words, and they have bounds");
    for (char const c : state.doing) expect(c >= ' ' && c <= '~', "what a rank did is for a terminal");
    expect(state.seconds >= 0 && state.seconds < 1e10, "no time is negative");
    expect(state.failed || !state.threw, "who threw has failed");
    expect(state.wrote || (!state.failed && !state.waited && state.asked == 0),
           "nothing is known of who wrote nothing");
}

bool same(ddprun::flight_state const& a, ddprun::flight_state const& b) {
    return a.wrote == b.wrote && a.failed == b.failed && a.threw == b.threw && a.waited == b.waited &&
           a.doing == b.doing && a.seconds == b.seconds && a.asked == b.asked;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    std::string_view const text(reinterpret_cast<char const*>(data), size);
    ddprun::flight_state const state = ddprun::state_of_flight(text);
    sound(state);
    std::string_view const whole = text.substr(0, text.rfind('\n') + 1);  // npos + 1 is 0
    expect(same(state, ddprun::state_of_flight(whole)), "a torn line is not there");
    // Two ranks: the whole record, and its first half.
    std::map<int, ddprun::flight_state> const ranks{{0, state}, {7, ddprun::state_of_flight(text.substr(0, size / 2))}};
    sound(ranks.at(7));
    std::string const story = ddprun::flight_story(ranks, {{0, "was not heard"}, {7, "was not heard"}}, true);
    expect(story.size() < 1000 && story.find("rank") != story.npos, "the story has bounds");
    for (char const c : story) expect(c == '\n' || (c >= ' ' && c <= '~'), "the story is for a terminal");
    return 0;
}
