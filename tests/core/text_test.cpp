// Texts for messages: what comes from outside cannot drive a terminal, and numbers do not depend on the locale.
#include <ddp/core/text.hpp>

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <string>

#include "support/catch.hpp"
#include "support/printed_by.hpp"

using ddp::detail::decimal;
using ddp::detail::in_quotes;
using ddp::detail::printable;

TEST_CASE("text from outside is shown without control characters and without bytes that are not UTF-8", "[core]") {
    CHECK(printable("plain\n\ttext, Grüße, 漢字, 🙂") == "plain\n\ttext, Grüße, 漢字, 🙂");
    CHECK(printable("\x1b[31mred\r\x7f") == "\\x1b[31mred\\x0d\\x7f");
    CHECK(printable("\xc2\x9b"
                    "31mred") == "\\xc2\\x9b31mred");  // CSI as a C1 control: U+009B
    CHECK(printable("\xc2\xa0|\xc2\x80|\xc2\x9f") == "\xc2\xa0|\\xc2\\x80|\\xc2\\x9f");
    CHECK(printable("\x9b"
                    "31m") == "\\x9b31m");         // and as one byte, which is not UTF-8
    CHECK(printable("\xe2\x82") == "\\xe2\\x82");  // cut short
    CHECK(printable(std::string(30, 'x'), 10) == "xxxxxxxxxx (cut)");
    CHECK(in_quotes("a\x1b\xc2\x9b"
                    "b\x9b"
                    "c") == "'a??b?c'");
    CHECK(in_quotes("größe") == "'größe'");
}

TEST_CASE("numbers in messages have nine digits, or as many as a float needs", "[core]") {
    CHECK(decimal(0.1) == "0.1");
    CHECK(decimal(1.0) == "1");
    CHECK(decimal(1e-5) == "1e-05");
    CHECK(decimal(1.0 / 3) == "0.333333333");
    CHECK(decimal(-2.5e300) == "-2.5e+300");
    CHECK(decimal(1e-5f) == "1e-05");
    CHECK(decimal(1.0f / 3) == "0.33333334");
    for (float const x : {0.1f, 16777217.0f, 3.4e38f, 1e-45f, -7.0f})
        CHECK(std::strtof(decimal(x).c_str(), nullptr) == x);
    CHECK(decimal(std::numeric_limits<double>::infinity()) == "inf");
}

TEST_CASE("a line is printed at once or, where nobody reads, not at all", "[core]") {
    using ddp::detail::print_if_ready;
    CHECK(ddp::test::printed_by([] { print_if_ready("ddp: a line\n"); }) == "ddp: a line\n");
    CHECK(ddp::test::printed_by([] { print_if_ready(""); }).empty());
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
    std::string const piece(1000, 'x');
    std::size_t filled = 0;
    for (::ssize_t n; (n = ::write(ends[1], piece.data(), piece.size())) > 0;) filled += static_cast<std::size_t>(n);
    ::fcntl(ends[1], F_SETFL, 0);
    int const kept = ::dup(STDERR_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    print_if_ready(piece);  // fprintf would wait for ever
    ::dup2(kept, STDERR_FILENO);
    std::size_t came = 0;
    std::string some(1 << 17, 0);
    for (::ssize_t n; (n = ::read(ends[0], some.data(), some.size())) > 0;) came += static_cast<std::size_t>(n);
    for (int const fd : {kept, ends[0], ends[1]}) ::close(fd);
    CHECK(filled > 0);
    CHECK(came == filled);
}
