/// \file
/// What data/csv.hpp declares.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/csv.hpp>

namespace ddp::detail {

/// Lines of a CSV file, taken one after the other.
class csv_parser {
public:
    csv_parser(std::string const& name, csv_options const& options) : name_(name), options_(options) {}

    void line(std::string_view text) {
        ++line_;
        if (line_ == 1 && text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
        if (text.ends_with('\r')) text.remove_suffix(1);
        if (without_blanks(text).empty()) fail(0, "is empty; remove it");
        if (line_ == 1 && options_.header)
            names(text);
        else
            numbers(text);
    }
    csv_table take() && {
        if (table_.rows == 0)
            throw data_error(errc::format, concat({name_, ": holds no rows of numbers",
                                                   line_ == 0 ? "" : ", only a line that names the columns"}));
        return std::move(table_);
    }

private:
    [[noreturn, gnu::cold]] void fail(std::size_t column, std::string const& what) const {
        std::string const where = column == 0 ? std::string() : concat({", column ", column});
        throw data_error(errc::format, concat({name_, ": line ", line_, where, ": ", what}));
    }
    static std::string_view without_blanks(std::string_view text) {
        while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
        while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
        return text;
    }
    void expect_columns(std::size_t count) {
        if (table_.columns == 0) table_.columns = count;
        if (count != table_.columns) fail(0, concat({"has ", count, " fields, the first line has ", table_.columns}));
    }

    void names(std::string_view text) {
        for (bool more = true; more;) {
            std::string field;
            std::size_t at = 0;
            while (at < text.size() && text[at] != options_.separator && (text[at] == ' ' || text[at] == '\t')) ++at;
            if (at < text.size() && text[at] == '"') {
                for (++at;; ++at) {
                    if (at == text.size()) fail(table_.names.size() + 1, "the quote is not closed on this line");
                    if (text[at] == '"') {  // the end, or one of two
                        ++at;
                        if (at == text.size() || text[at] != '"') break;
                    }
                    field += text[at];
                }
                std::string_view const rest = text.substr(at, text.find(options_.separator, at) - at);
                if (!without_blanks(rest).empty())
                    fail(table_.names.size() + 1, concat({in_quotes(rest), " follows the closing quote"}));
                at += rest.size();
            } else {
                at = std::min(text.find(options_.separator), text.size());
                field = without_blanks(text.substr(0, at));
            }
            table_.names.push_back(std::move(field));
            more = at < text.size();
            text.remove_prefix(more ? at + 1 : at);
        }
        expect_columns(table_.names.size());
    }

    void numbers(std::string_view text) {
        std::size_t column = 0;
        for (bool more = true; more;) {
            ++column;
            std::size_t const end = text.find(options_.separator);
            std::string_view const field = without_blanks(text.substr(0, end));
            double value = 0;
            auto const [stop, problem] = std::from_chars(field.data(), field.data() + field.size(), value);
            if (problem == std::errc::result_out_of_range)
                fail(column, concat({in_quotes(field), " is out of a double's range"}));
            if (problem != std::errc() || stop != field.data() + field.size())
                fail(column, field.empty() ? std::string("is empty, expected a number")
                                           : concat({in_quotes(field), " is not a number",
                                                     field.starts_with('+') ? "; leave out the plus"
                                                     : line_ == 1 && !options_.header
                                                         ? "; set csv_options::header if this line names the columns"
                                                         : ""}));
            table_.values.push_back(value);
            more = end != text.npos;
            if (more) text.remove_prefix(end + 1);
        }
        expect_columns(column);
        ++table_.rows;
    }

    std::string const& name_;
    csv_options const& options_;
    std::size_t line_ = 0;
    csv_table table_;
};

[[gnu::cold]] DDP_DECL csv_table read_csv(function_ref<std::size_t(mutable_bytes)> read, std::string const& name,
                                          csv_options const& options) {
    DDP_EXPECTS(std::string_view(" \"\r\n+-.0123456789").find(options.separator) == std::string_view::npos &&
                    !((options.separator | 32) >= 'a' && (options.separator | 32) <= 'z') && options.separator != 0,
                "read_csv: the separator may not be part of a field; ',' ';' and tabs are usual");
    csv_parser parser(name, options);
    std::string rest;  // of a line that the last piece began
    std::vector<char> piece(std::size_t{1} << 16);
    std::size_t bytes = 0;
    for (bool ended = false; !ended;) {
        std::size_t const got = read(as_mutable_bytes(std::span(piece)));
        ended = got < piece.size();
        bytes += got;
        if (bytes > options.max_bytes)
            throw data_error(errc::format, concat({name, ": is longer than the limit of ", options.max_bytes,
                                                   " bytes; raise csv_options::max_bytes if that is what it holds"}));
        std::string_view text(piece.data(), got);
        for (std::size_t end = text.find('\n'); end != text.npos; end = text.find('\n')) {
            if (rest.empty()) {
                parser.line(text.substr(0, end));
            } else {
                rest += text.substr(0, end);
                parser.line(rest);
                rest.clear();
            }
            text.remove_prefix(end + 1);
        }
        rest += text;
    }
    if (!rest.empty()) parser.line(rest);
    return std::move(parser).take();
}

}  // namespace ddp::detail
