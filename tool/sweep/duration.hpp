#pragma once

#include <string>

namespace switchyard::tool {

/// "45 s", "5 minutes", "2.22 hours": three digits at most.
[[nodiscard]] std::string human_duration(double seconds);

/// Seconds for `samples` texts of `prompt` tokens and `generate` more each, at one rate for both.
[[nodiscard]] double text_seconds(double samples, double prompt, double generate,
                                  double tokens_per_second);

}  // namespace switchyard::tool
