#pragma once

// oneDNN's products of one layer's experts: weights packed into its own layout, a primitive for
// every number of rows that occurs. Only where the build has oneDNN.

#include <map>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "bench/peers/onednn.hpp"
#include "core/cpu/memory.hpp"

namespace switchyard::bench {

class OnednnProducts {
 public:
  /// `rows`: of each expert; none are made for experts without. `layout`: of the weights.
  OnednnProducts(const OnednnLoopArgs& args, const std::vector<std::int64_t>& rows,
                 dnnl::memory::format_tag layout);

  /// Of an expert with m rows: wide = x [gate up], down = inner W2.
  void multiply_first(std::size_t expert, std::int64_t m) { execute(first_.at(m), w13_[expert]); }
  void multiply_second(std::size_t expert, std::int64_t m) { execute(second_.at(m), w2_[expert]); }

  std::vector<std::byte> x, inner;  ///< Gathered rows [m, H], act(gate) * up [m, I].
  std::vector<float> wide, down;    ///< [m, 2I], [m, H].

 private:
  /// y[m, cols] = x[m, depth] W for one m.
  struct Product {
    dnnl::matmul primitive;
    dnnl::memory in, out;
  };

  [[nodiscard]] DType dtype() const { return args_.tokens.dtype; }
  [[nodiscard]] dnnl::matmul::primitive_desc describe(std::int64_t m, std::int64_t depth,
                                                      std::int64_t cols) const;
  void make_products(const std::vector<std::int64_t>& rows);
  dnnl::memory packed(const std::vector<std::byte>& given, std::int64_t m, std::int64_t depth,
                      std::int64_t cols);
  void pack_weights(const std::vector<std::int64_t>& rows);
  void execute(Product& product, const dnnl::memory& weights);

  const OnednnLoopArgs args_;
  const dnnl::memory::format_tag layout_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::vector<cpu::HugeBuffer> memory_;             // of the weights: huge pages, as ours have
  std::vector<dnnl::memory> w13_, w2_;              // per expert hit
  std::map<std::int64_t, Product> first_, second_;  // by number of rows
};

}  // namespace switchyard::bench
