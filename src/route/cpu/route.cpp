// Selection on a CPU: for each token the scores, the groups and the top_k, in one pass over its
// logits while they are in the cache. Bound by the exponentials; tokens are split over the threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/check.hpp"
#include "route/cpu/rule.hpp"
#include "route/cpu/tokens.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

constexpr std::size_t index(std::int32_t i) { return static_cast<std::size_t>(i); }

/// A sorted list of the best few candidates: larger key first, then the one that came first.
class Best {
 public:
  explicit Best(std::int32_t size) : size_(size), key_(index(size)), id_(index(size)) {}

  void clear() { count_ = 0; }
  [[nodiscard]] std::int32_t id(std::int32_t i) const { return id_[index(i)]; }
  [[nodiscard]] std::int32_t count() const { return count_; }

  /// Candidates must come in ascending id.
  void offer(float key, std::int32_t id) {
    if (count_ == size_ && !(key > key_[index(size_ - 1)])) return;
    std::int32_t i = count_ < size_ ? count_++ : size_ - 1;
    for (; i > 0 && key > key_[index(i - 1)]; --i) {
      key_[index(i)] = key_[index(i - 1)];
      id_[index(i)] = id_[index(i - 1)];
    }
    key_[index(i)] = key;
    id_[index(i)] = id;
  }

 private:
  std::int32_t size_;
  std::int32_t count_ = 0;
  std::vector<float> key_;
  std::vector<std::int32_t> id_;
};

/// What an expert without room adds to its group, which finite scores are above.
constexpr float kFull = -1e30F;

/// Routes one token after the other; one per task, for its scratch memory.
class TokenRouter {
 public:
  explicit TokenRouter(const RouteArgs& args)
      : args_(args),
        num_experts_(args.config.num_experts),
        router_(args.config.as_top_k()),
        by_logit_(compares_logits(args)),
        scores_(index(num_experts_)),
        keys_(index(num_experts_)),
        room_(args.room > 0 ? index(num_experts_) : 0, args.room),
        chosen_(router_.top_k),
        full_(router_.top_k),
        chosen_groups_(router_.top_groups) {}

  /// False if a logit is NaN; `nan` is then the lowest expert with one.
  bool operator()(std::int64_t token, std::int32_t* nan) {
    const float* logits = args_.logits.row(token);
    float largest = -std::numeric_limits<float>::infinity();
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      if (std::isnan(logits[e])) {
        *nan = e;
        return false;
      }
      largest = std::max(largest, logits[e]);
    }
    const bool needs_sum = router_.score == Score::kSoftmax && !router_.renormalize;
    const bool needs_top = args_.request.top_score.data != nullptr;
    float sum = 0.0F;
    if (router_.score != Score::kSigmoid && (!by_logit_ || needs_sum || needs_top)) {
      for (std::int32_t e = 0; e < num_experts_; ++e) {
        sum += scores_[index(e)] = exp_below(logits[e], largest);
      }
    }
    if (needs_top) {
      args_.request.top_score[token] =
          router_.score == Score::kSigmoid ? sigmoid(largest) : 1.0F / sum;
    }
    choose(make_keys(logits, sum));
    write(token, logits, largest, sum);
    return true;
  }

 private:
  /// What the selection compares.
  const float* make_keys(const float* logits, float sum) {
    if (by_logit_) return logits;
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      const auto i = index(e);
      float key = logits[e];
      if (router_.score == Score::kSoftmax) key = scores_[i] / sum;
      if (router_.score == Score::kSigmoid) key = sigmoid(logits[e]);
      if (args_.selection_bias.data != nullptr) key += args_.selection_bias[e];
      keys_[i] = key;
    }
    return keys_.data();
  }

  /// Experts without room come behind all that have some.
  void offer(float key, std::int32_t e) {
    if (room_.empty() || room_[index(e)] > 0) {
      chosen_.offer(key, e);
    } else {
      full_.offer(key, e);
    }
  }

  void choose(const float* keys) {
    chosen_.clear();
    full_.clear();
    const std::int32_t width = num_experts_ / router_.groups;
    if (router_.groups == router_.top_groups) {
      for (std::int32_t e = 0; e < num_experts_; ++e) offer(keys[e], e);
      return;
    }
    chosen_groups_.clear();
    for (std::int32_t g = 0; g < router_.groups; ++g) {
      chosen_groups_.offer(group_score(keys, g * width, width), g);
    }
    group_ids_.clear();
    for (std::int32_t i = 0; i < router_.top_groups; ++i)
      group_ids_.push_back(chosen_groups_.id(i));
    std::sort(group_ids_.begin(), group_ids_.end());  // candidates come in ascending id
    for (const std::int32_t g : group_ids_) {
      for (std::int32_t e = g * width; e < (g + 1) * width; ++e) offer(keys[e], e);
    }
  }

  [[nodiscard]] float group_score(const float* keys, std::int32_t begin, std::int32_t width) const {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    float first = kNone;
    float second = kNone;
    for (std::int32_t e = begin; e < begin + width; ++e) {
      const float key = room_.empty() || room_[index(e)] > 0 ? keys[e] : kFull;
      second = std::max(second, std::min(first, key));
      first = std::max(first, key);
    }
    // The two best may be opposite infinities when logits are compared: a group of one has no
    // second, and -inf + inf must not become NaN.
    if (router_.group_score == GroupScore::kMax || width == 1) return first;
    return second == kNone ? kNone : first + second;
  }

  void write(std::int64_t token, const float* logits, float largest, float sum) {
    std::int32_t* expert = args_.routing.expert.row(token);
    float* weight = args_.routing.weight.row(token);
    const std::int32_t top_k = router_.top_k;
    const std::int32_t with_room = chosen_.count();
    for (std::int32_t k = 0; k < top_k; ++k) {
      expert[k] = k < with_room ? chosen_.id(k) : full_.id(k - with_room);
    }
    for (std::int32_t k = 0; k < with_room && !room_.empty(); ++k) --room_[index(expert[k])];
    if (router_.score == Score::kSigmoid) {
      for (std::int32_t k = 0; k < top_k; ++k) weight[k] = sigmoid(logits[expert[k]]);
      if (router_.renormalize) normalize(logits, expert, weight);
    } else if (router_.score == Score::kSparseMixer) {
      mix(logits, expert, weight);
      if (router_.renormalize) normalize(logits, expert, weight);
    } else if (router_.score == Score::kSoftmax && !router_.renormalize) {
      for (std::int32_t k = 0; k < top_k; ++k) {
        weight[k] = exp_below(logits[expert[k]], largest) / sum;
      }
    } else {
      softmax_of_chosen(logits, expert, weight);
    }
    for (std::int32_t k = 0; k < top_k; ++k) weight[k] *= router_.scale;
  }

  /// Of each choice the softmax over it and those near it that are left.
  void mix(const float* logits, const std::int32_t* expert, float* weight) const {
    for (std::int32_t k = 0; k < router_.top_k; ++k) {
      const float largest = logits[expert[k]];
      float sum = 0.0F;
      for (std::int32_t e = 0; e < num_experts_; ++e) {
        if (std::find(expert, expert + k, e) != expert + k) continue;
        if (is_near(logits[e], largest)) sum += exp_below(logits[e], largest);
      }
      weight[k] = 1.0F / sum;
    }
  }

  /// Softmax, renormalised, is the softmax over the chosen logits, and never 0/0.
  void softmax_of_chosen(const float* logits, const std::int32_t* expert, float* weight) const {
    float largest = logits[expert[0]];
    for (std::int32_t k = 1; k < router_.top_k; ++k) largest = std::max(largest, logits[expert[k]]);
    float sum = 0.0F;
    for (std::int32_t k = 0; k < router_.top_k; ++k) {
      sum += weight[k] = exp_below(logits[expert[k]], largest);
    }
    for (std::int32_t k = 0; k < router_.top_k; ++k) weight[k] /= sum;
  }

  void normalize(const float* logits, const std::int32_t* expert, float* weight) const {
    float sum = 0.0F;
    for (std::int32_t k = 0; k < router_.top_k; ++k) sum += weight[k];
    if (sum >= std::numeric_limits<float>::min()) {
      for (std::int32_t k = 0; k < router_.top_k; ++k) weight[k] /= sum;
    } else {
      // All of them underflow, where sigmoid(x) = exp(x) to float accuracy: the ratios survive.
      softmax_of_chosen(logits, expert, weight);
    }
  }

  const RouteArgs& args_;
  std::int32_t num_experts_;
  const TopKRouter& router_;
  bool by_logit_;
  std::vector<float> scores_, keys_;
  std::vector<std::int64_t> room_;  ///< That each expert has left; empty: any number.
  Best chosen_, full_, chosen_groups_;
  std::vector<std::int32_t> group_ids_;
};

void require_finite_bias(Vector<const float> bias) {
  if (bias.data == nullptr) return;
  for (std::int64_t e = 0; e < bias.shape[0]; ++e) {
    require(std::isfinite(bias[e]), "selection_bias[{}]={} is not finite", e, bias[e]);
  }
}

void run(const RouteArgs& args) {
  require_finite_bias(args.selection_bias);
  routing::LowestNan lowest(args.config.num_experts);
  if (args.room > 0) {  // what a token finds is what those before have left
    TokenRouter router(args);
    for (std::int64_t token = 0; token < args.logits.shape[0]; ++token) {
      std::int32_t nan = 0;
      if (!router(token, &nan)) lowest.report(token, nan);
    }
    lowest.require_none();
    return;
  }
  routing::for_tokens(args.execution.pool, args.logits.shape[0], [&] {
    return [&, router = TokenRouter(args)](std::int64_t token) mutable {
      std::int32_t nan = 0;
      if (!router(token, &nan)) lowest.report(token, nan);
    };
  });
  lowest.require_none();
}

}  // namespace

const Implementation<RouteArgs> kRouteCpu{"cpu.scan", reject_but<TopKRouter, RouteArgs>, run};

}  // namespace switchyard
