#pragma once

// The commands of the tool. Each returns an exit code and throws UsageError or switchyard::Error.

#include "tool/options/options.hpp"

namespace switchyard::tool {

int run_command(const Options& options);
int verify_command(const Options& options);
int bench_command(const Options& options);
int sweep_command(const Options& options);
int train_command(const Options& options);
int tokenizer_command(const Options& options);
int evaluate_command(const Options& options);
int generate_command(const Options& options);
int study_command(const Options& options);
int devices_command(const Options& options);
int routers_command(const Options& options);
int make_checkpoint_command(const Options& options);
int report_command(const Options& options);

}  // namespace switchyard::tool
