// The stages that move and add rows (plan, pack, combine, finish), each called by itself with
// made-up rows, against their definitions: by bits, since the contract fixes the order of sums.
#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "reference/reference.hpp"
#include "switchyard/switchyard.hpp"
#include "testkit/random.hpp"
#include "verify/check_layer.hpp"
#include "verify/stage_checks.hpp"

namespace switchyard::verify {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

class RowCheck {
 public:
  RowCheck(const Problem& problem, const StageCalls& calls, const Execution& execution,
           const KeptRouting& routing)
      : problem_(problem),
        calls_(calls),
        test_(problem.test),
        config_(problem.test.layer.router),
        execution_(execution),
        expert_(routing.expert),
        weight_(routing.weight),
        kept_(routing.kept),
        num_tokens_(problem.test.num_tokens),
        top_k_(problem.test.layer.router.top_k()),
        hidden_(problem.test.layer.experts.hidden) {
    make_rows();
  }

  std::string run() {
    for (int rank = 0; rank < test_.ranks; ++rank) {
      const std::string wrong = check_rank(rank);
      if (!wrong.empty()) return fmt::format("of rank {}: {}", rank, wrong);
    }
    return check_finish();
  }

 private:
  /// A made-up row for every assignment: what its expert would have given.
  void make_rows() {
    Random random(test_.seed, 98);
    values_.resize(expert_.size() * at(hidden_));
    for (float& value : values_) value = random.signed_unit();
    shared_.resize(at(num_tokens_ * hidden_));
    for (float& value : shared_) value = random.signed_unit();
    order_ = {.num_experts = config_.num_experts,
              .groups = test_.layer.reduction_groups,
              .ranks = test_.ranks,
              .wire = wire(),
              .rank_invariant = test_.rank_invariant};
  }

  [[nodiscard]] DType wire() const {
    return test_.wire == DType::kF8E4M3 ? DType::kF32 : test_.wire;
  }

  [[nodiscard]] bool is_kept(std::int64_t i, std::int32_t first, std::int32_t end) const {
    return kept_[at(i)] != 0 && expert_[at(i)] >= first && expert_[at(i)] < end;
  }

  [[nodiscard]] std::vector<reference::Term> terms_of(std::int64_t token, std::int64_t h) const {
    std::vector<reference::Term> terms;
    for (std::int64_t i = token * top_k_; i < (token + 1) * top_k_; ++i) {
      if (kept_[at(i)] == 0) continue;
      terms.push_back({expert_[at(i)], weight_[at(i)], values_[at(i * hidden_ + h)]});
    }
    return terms;
  }

  std::string check_rank(int rank) {
    const std::int64_t num_experts = config_.num_experts;
    const auto first = static_cast<std::int32_t>(rank * num_experts / test_.ranks);
    const auto end = static_cast<std::int32_t>((rank + 1) * num_experts / test_.ranks);
    std::vector<std::int64_t> rows(at(end - first) + 1);
    for (std::int64_t i = 0; i < std::ssize(expert_); ++i) {
      if (is_kept(i, first, end)) ++rows[at(expert_[at(i)] - first)];
    }
    const std::int64_t padded = test_.layout.kind == LayoutKind::kPadded
                                    ? *std::max_element(rows.begin(), rows.end()) +
                                          static_cast<std::int64_t>(test_.seed % 2)
                                    : 0;
    const PlanView view =
        plan_.reserve(num_tokens_, top_k_, end - first,
                      max_rows(test_.layout, num_tokens_, top_k_, end - first, padded));
    calls_.plan({.assignments = DenseAssignments{.expert = {expert_.data(), {num_tokens_, top_k_}},
                                                 .weight = {weight_.data(), {num_tokens_, top_k_}}},
                 .kept = {kept_.data(), {num_tokens_ * top_k_}},
                 .first_expert = first,
                 .layout = test_.layout,
                 .padded_rows = padded,
                 .plan = view,
                 .execution = execution_});
    std::string wrong = check_plan(view, first, end, padded);
    if (wrong.empty()) wrong = check_pack(view);
    if (wrong.empty()) wrong = check_combine(view, rank, first);
    return wrong;
  }

  /// The plan's rows, one after the other, from the definition. Leaves in row_source_ the
  /// assignment of each row, -1 for padding.
  std::string check_plan(const PlanView& view, std::int32_t first, std::int32_t end,
                         std::int64_t padded) {
    row_source_.clear();
    for (std::int32_t e = first; e < end; ++e) {
      const std::int64_t begin = std::ssize(row_source_);
      for (std::int64_t i = 0; i < std::ssize(expert_); ++i) {
        if (is_kept(i, e, e + 1)) row_source_.push_back(i);
      }
      const std::int64_t used = std::ssize(row_source_) - begin;
      const std::int64_t n = test_.layout.alignment;
      const std::int64_t size = test_.layout.kind == LayoutKind::kCompact   ? used
                                : test_.layout.kind == LayoutKind::kAligned ? (used + n - 1) / n * n
                                                                            : padded;
      row_source_.resize(at(begin + size), -1);
      if (view.expert_begin[e - first] != begin || view.expert_rows[e - first] != used) {
        return fmt::format("plan: expert {} has {} rows from {}, want {} from {}", e,
                           view.expert_rows[e - first], view.expert_begin[e - first], used, begin);
      }
    }
    if (view.expert_begin[end - first] != std::ssize(row_source_)) {
      return fmt::format("plan: {} rows, want {}", view.expert_begin[end - first],
                         row_source_.size());
    }
    std::vector<std::vector<std::int32_t>> rows_of_token(at(num_tokens_));
    for (std::size_t row = 0; row < row_source_.size(); ++row) {
      const std::int64_t i = row_source_[row];
      const auto index = static_cast<std::int64_t>(row);
      const std::int64_t token = i < 0 ? -1 : i / top_k_;
      const float weight = i < 0 ? 0.0F : weight_[at(i)];
      if (view.row_token[index] != token || !same_bits(view.row_weight[index], weight)) {
        return fmt::format("plan: row {} is of token {} with weight {}, want {} with {}", row,
                           view.row_token[index], view.row_weight[index], token, weight);
      }
      if (i >= 0) rows_of_token[at(token)].push_back(static_cast<std::int32_t>(row));
    }
    std::int64_t begin = 0;
    for (std::int64_t t = 0; t < num_tokens_; ++t) {
      const auto& rows = rows_of_token[at(t)];
      const bool right = view.token_begin[t] == begin &&
                         view.token_begin[t + 1] == begin + std::ssize(rows) &&
                         std::equal(rows.begin(), rows.end(), view.token_row.data + begin);
      if (!right) return fmt::format("plan: wrong rows for token {}", t);
      begin += std::ssize(rows);
    }
    return {};
  }

  std::string check_pack(const PlanView& view) {
    const auto x = encode(test_.compute, problem_.tokens);
    const std::int64_t row_bytes = hidden_ * size_of(test_.compute);
    const auto num_rows = std::ssize(row_source_);
    std::vector<std::byte> rows(at(num_rows * row_bytes), std::byte{0xff});
    calls_.pack({.x = {x.data(), test_.compute, num_tokens_, hidden_},
                 .plan = view,
                 .rows = {rows.data(), test_.compute, num_rows, hidden_},
                 .execution = execution_});
    const std::vector<std::byte> zero(at(row_bytes));
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::int64_t i = row_source_[at(row)];
      const std::byte* want = i < 0 ? zero.data() : x.data() + i / top_k_ * row_bytes;
      if (!std::equal(want, want + row_bytes, rows.data() + row * row_bytes)) {
        return fmt::format("pack: row {} is not that of assignment {}", row, i);
      }
    }
    return {};
  }

  std::string check_combine(const PlanView& view, int rank, std::int32_t first) {
    const auto num_rows = std::ssize(row_source_);
    std::vector<float> rows(at(num_rows * hidden_), std::nanf(""));
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::int64_t i = row_source_[at(row)];
      if (i >= 0) {
        std::copy_n(values_.data() + i * hidden_, hidden_, rows.data() + row * hidden_);
      }
    }
    const std::int64_t groups = test_.rank_invariant ? order_.groups_of_rank() : 1;
    std::vector<std::byte> sums(at(num_tokens_ * groups * hidden_ * size_of(wire())),
                                std::byte{0xff});
    calls_.combine(
        {.rows = {reinterpret_cast<const std::byte*>(rows.data()), DType::kF32, num_rows, hidden_},
         .plan = view,
         .first_expert = first,
         .reduced = {.sums = {sums.data(), wire(), num_tokens_ * groups, hidden_},
                     .subtree = subtree_of_rank(
                         {.num_experts = config_.num_experts, .groups = order_.groups}, rank,
                         test_.ranks),
                     .each_group = test_.rank_invariant},
         .execution = execution_});
    const std::vector<float> got = decode(wire(), sums);
    for (std::int64_t t = 0; t < num_tokens_; ++t) {
      for (std::int64_t h = 0; h < hidden_; ++h) {
        const auto terms = terms_of(t, h);
        for (std::int64_t g = 0; g < groups; ++g) {
          float want = order_.rank_part(terms, rank);
          if (test_.rank_invariant) {
            const auto group = static_cast<std::int32_t>(rank * groups + g);
            want = order_.group_partial(terms, group);
          }
          want = static_cast<float>(reference::round_value(wire(), double{want}));
          const float have = got[at((t * groups + g) * hidden_ + h)];
          if (!same_bits(have, want)) {
            return fmt::format("combine: sum[{}, {}] of group {} is {}, want {}", t, h, g, have,
                               want);
          }
        }
      }
    }
    parts_.push_back(std::move(sums));
    return {};
  }

  std::string check_finish() {
    const std::int64_t groups = test_.rank_invariant ? order_.groups_of_rank() : 1;
    const std::int64_t row_bytes = groups * hidden_ * size_of(wire());
    // Only the parts of ranks that have an expert of the token arrive, in any place.
    std::vector<std::byte> partials;
    std::vector<std::int32_t> partial_row(at(num_tokens_ * test_.ranks), -1);
    std::int32_t next = 0;
    for (int rank = test_.ranks - 1; rank >= 0; --rank) {
      const std::int64_t num_experts = config_.num_experts;
      const auto first = static_cast<std::int32_t>(rank * num_experts / test_.ranks);
      const auto end = static_cast<std::int32_t>((rank + 1) * num_experts / test_.ranks);
      for (std::int64_t t = 0; t < num_tokens_; ++t) {
        bool any = false;
        for (std::int64_t k = 0; k < top_k_; ++k) any = any || is_kept(t * top_k_ + k, first, end);
        if (!any) continue;
        const auto begin = parts_[at(rank)].begin() + t * row_bytes;
        partials.insert(partials.end(), begin, begin + row_bytes);
        partial_row[at(t * test_.ranks + rank)] = next++;
      }
    }
    std::vector<std::byte> out(at(num_tokens_ * hidden_ * size_of(test_.output)), std::byte{0xff});
    const bool shared = test_.layer.shared.num_experts > 0;
    calls_.finish(
        {.partials = {partials.data(), wire(), next * groups, hidden_},
         .partial_row = {partial_row.data(), {num_tokens_, test_.ranks}},
         .groups_per_row = static_cast<std::int32_t>(groups),
         .shared = {shared ? shared_.data() : nullptr, {shared ? num_tokens_ : 0, hidden_}},
         .out = {out.data(), test_.output, num_tokens_, hidden_},
         .execution = execution_});
    const std::vector<float> got = decode(test_.output, out);
    for (std::int64_t t = 0; t < num_tokens_; ++t) {
      for (std::int64_t h = 0; h < hidden_; ++h) {
        const auto terms = terms_of(t, h);
        float want = order_.total(terms);
        if (test_.ranks == 1 && !test_.rank_invariant) {
          want = static_cast<float>(reference::round_value(wire(), double{want}));
        }
        if (shared) want += shared_[at(t * hidden_ + h)];
        want = static_cast<float>(reference::round_value(test_.output, double{want}));
        if (!same_bits(got[at(t * hidden_ + h)], want)) {
          return fmt::format("finish: out[{}, {}] is {}, want {}", t, h, got[at(t * hidden_ + h)],
                             want);
        }
      }
    }
    return {};
  }

  const Problem& problem_;
  const StageCalls& calls_;
  const Case& test_;
  const RouterConfig& config_;
  const Execution& execution_;
  const std::vector<std::int32_t>& expert_;
  const std::vector<float>& weight_;
  const std::vector<std::uint8_t>& kept_;
  std::int64_t num_tokens_;
  std::int64_t top_k_;
  std::int64_t hidden_;
  std::vector<float> values_;                  ///< [T * K, H].
  std::vector<float> shared_;                  ///< [T, H].
  std::vector<std::int64_t> row_source_;       ///< [rows] assignment, -1 padding.
  std::vector<std::vector<std::byte>> parts_;  ///< [R] what combine gave.
  Plan plan_;
  reference::FixedOrder order_;
};

}  // namespace

std::string check_row_stages(const Problem& problem, const StageCalls& calls,
                             const Execution& execution, const KeptRouting& routing) {
  return RowCheck(problem, calls, execution, routing).run();
}

}  // namespace switchyard::verify
