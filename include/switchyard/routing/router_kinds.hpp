#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/router.hpp"

namespace switchyard {

// The routers by name: one table, from which the tool, C and Python read spellings, and
// `switchyard routers` prints. docs/routers.md says which is for whom.

struct RouterOption {
  const char* name;    ///< "capacity-factor"; "_" may stand for "-".
  const char* value;   ///< "F", or the words allowed: "yes|no".
  const char* help;    ///< What it is, and what it is without being given.
  double low = 0;      ///< Of a number.
  double high = 0;     ///< Of a number; both 0: words.
  bool whole = false;  ///< Whole numbers only.
};

struct RouterKind {
  const char* name;  ///< "expert-choice".
  const char* rule;  ///< In one sentence.
  std::span<const RouterOption> options;
  bool causal;          ///< A token's experts do not depend on later tokens.
  bool variable;        ///< Any number of experts a token: RouterConfig::is_variable().
  bool trainable;       ///< The layer's gradient reaches the gate.
  const char* weights;  ///< What a token's weights sum to.
  const char* losses;   ///< Which auxiliary losses fit.
  const char* source;   ///< Paper, as "authors year (arXiv:...)".
  bool on_gpu = true;   ///< Whether a GPU has it; a layer there refuses the others by name.
};

[[nodiscard]] std::span<const RouterKind> router_kinds();

/// What mixes tokens instead of choosing experts (soft_moe.hpp): no routing of a layer, but listed
/// beside those. Their options are the members of SoftMoeConfig.
[[nodiscard]] std::span<const RouterKind> mixing_kinds();

/// What learns beside a frozen layer (perft.hpp), likewise; parse_perft() reads its spelling.
[[nodiscard]] std::span<const RouterKind> adapter_kinds();

/// @throws Error{kInvalidArgument} with all names; of a mixing or adapters it says what does it.
[[nodiscard]] const RouterKind& find_router_kind(std::string_view name);

/// A router as it is spelled: NAME[:OPTION=VALUE,...]. What is not said is taken from `base` where
/// it has it (its experts and top_k; of top-k everything), else the option's default.
/// @throws Error{kInvalidArgument} that names the word which is wrong and says what would be right.
[[nodiscard]] RouterConfig parse_router(std::string_view spelling, const RouterConfig& base);

}  // namespace switchyard
