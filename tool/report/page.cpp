// The page: its parts in their order, with the files of tool/report/page inside.
#include "tool/report/page.hpp"

#include <fmt/core.h>

#include "report_files.hpp"
#include "tool/report/plots.hpp"
#include "tool/report/sections.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

template <std::size_t kSize>
std::string text_of_file(const unsigned char (&bytes)[kSize]) {
  return {reinterpret_cast<const char*>(bytes), kSize - 1};  // a zero ends each
}

/// What draws the plots, with its licence; "" where the build had none.
std::string plot_scripts() {
  if (!has_plots()) return "";
  return fmt::format("<style>{}</style>\n<script>\n/*\n{}*/\n{}\n</script>\n",
                     text_of_file(report_files::kDygraphsStyle),
                     text_of_file(report_files::kDygraphsLicense),
                     text_of_file(report_files::kDygraphsScript));
}

std::string plots_missing() {
  if (has_plots()) {
    return "<noscript><p class=notice>Plots and sorting need JavaScript; the tables hold every "
           "figure without it.</p></noscript>\n";
  }
  return "<p class=notice>Plots are left out: this switchyard was built without dygraphs (Debian's "
         "libjs-dygraphs). The tables hold every figure.</p>\n";
}

std::string link_to(const char* id, const char* words, const std::string& section) {
  return section.empty() ? "" : fmt::format("<a href='#{}'>{}</a>", id, words);
}

constexpr const char* kWhat =
    "Times of the stages of Mixture-of-Experts layers (route, plan, pack, experts, combine, and "
    "the "
    "exchange between ranks), made from the lines that switchyard bench and its companions wrote.";

constexpr const char* kWords = R"(<section id=words><h2>How to read the figures</h2>
<dl class=words>
<dt>T, E, K, H, I, R, S<dd>tokens, experts, experts of a token, hidden size, width of an expert, ranks, shared experts
<dt>median, p95<dd>over the runs of a stage, in microseconds; half, and 95 of 100, took no longer
<dt>limit<dd>what the stage's bytes, its products or its wire take at the measured rates; "of the limit" is limit / median
<dt>GB/s<dd>bytes that the stage has to move, each once, over its median; 1 GB is 10<sup>9</sup> bytes
<dt>GB/s of pack and combine<dd>two conventions: 2(K+1)HTb counts what both read and write (the token once and its K rows, b bytes a value);
2KHTb counts only the K rows, there and back. The first is the larger by (K+1)/K
<dt>GB/s between ranks<dd>"GB/s" counts bytes that leave a rank; "by tokens received" each token that a rank receives once, its own too;
"by choices" every choice of an expert, T x K. They differ several times and must not be mixed
<dt>TFLOP/s<dd>useful operations only: rows of padding count for nothing
<dt>load CV<dd>standard deviation of the experts' loads over their mean; random routing cannot do better than sqrt((E - 1) / (T K))
<dt>holds, MISS<dd>whether the figure is on the right side of its bar
</dl></section>
)";

}  // namespace

bool has_plots() { return sizeof report_files::kDygraphsScript > 1; }

std::string page_of(const Lines& lines) {
  const std::vector<Suite> suites = suites_of(lines);
  const std::string bars = bars_of(lines);
  const std::string rooflines = rooflines_of(lines);
  const std::string routing = routing_of(lines);
  const std::string capacity = capacity_of(lines);
  const std::string trades = trades_of(lines);
  std::string main =
      overview_of(lines, suites) + bars + machines_of(lines) + rooflines + routing + capacity +
      trades +
      "<section id=suites><h2>Suites</h2>\n<p>Every line that was read stands in one of these "
      "tables. Click a column's head to sort by it.</p>\n";
  for (std::size_t i = 0; i < suites.size(); ++i) {
    main += section_of(suites[i], fmt::format("s{}", i));
  }
  main += std::string("</section>\n") + kWords;
  const std::string links =
      "<a href='#overview'>Overview</a>" + link_to("bars", "Bars", bars) +
      link_to("machines", "Machines", "always") + link_to("roofline", "Roofline", rooflines) +
      link_to("routing", "Routing", routing) + link_to("capacity", "Capacity", capacity) +
      link_to("trades", "Trade-offs", trades) + link_to("suites", "Suites", "always") +
      link_to("words", "How to read", "always");
  return page_around("Switchyard: what was measured", kWhat, links, main);
}

std::string page_around(const std::string& title, const std::string& what, const std::string& links,
                        const std::string& main) {
  const std::string head = escape_html(title);
  return fmt::format(
             "<!DOCTYPE html>\n<html lang=en>\n<head><meta charset=utf-8>\n"
             "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
             "<title>{}</title>\n{}<style>\n{}</style>\n</head>\n<body>\n"
             "<header><h1>{}</h1>\n<p>{}</p>\n<nav>{}</nav></header>\n<main>\n",
             head, plot_scripts(), text_of_file(report_files::kStyle), head, escape_html(what),
             links) +
         plots_missing() + main + "</main>\n<script>\n" + text_of_file(report_files::kScript) +
         "</script>\n</body>\n</html>\n";
}

}  // namespace switchyard::tool
