#if SWITCHYARD_WITH_ONEDNN

#include "bench/peers/onednn_products.hpp"

#include <algorithm>

namespace switchyard::bench {
namespace {

using dnnl::memory;

memory::data_type type_of(DType dtype) {
  return dtype == DType::kF32 ? memory::data_type::f32 : memory::data_type::bf16;
}

memory::desc plain(std::int64_t rows, std::int64_t cols, memory::data_type type) {
  return {{rows, cols}, type, memory::format_tag::ab};
}

}  // namespace

OnednnProducts::OnednnProducts(const OnednnLoopArgs& args, const std::vector<std::int64_t>& rows,
                               memory::format_tag layout)
    : args_(args), layout_(layout) {
  make_products(rows);
  pack_weights(rows);
}

/// The weights' layout [depth, cols] does not depend on m.
dnnl::matmul::primitive_desc OnednnProducts::describe(std::int64_t m, std::int64_t depth,
                                                      std::int64_t cols) const {
  const memory::desc weights({depth, cols}, type_of(dtype()), layout_);
  const dnnl::matmul::desc desc(plain(m, depth, type_of(dtype())), weights,
                                plain(m, cols, memory::data_type::f32));
  return {desc, engine_};
}

void OnednnProducts::make_products(const std::vector<std::int64_t>& rows) {
  const std::int64_t hidden = args_.config.hidden;
  const std::int64_t inner_cols = args_.config.inner;
  const std::int64_t most = std::max<std::int64_t>(1, *std::max_element(rows.begin(), rows.end()));
  x.resize(static_cast<std::size_t>(most * hidden * size_of(dtype())));
  inner.resize(static_cast<std::size_t>(most * inner_cols * size_of(dtype())));
  wide.resize(static_cast<std::size_t>(most * 2 * inner_cols));
  down.resize(static_cast<std::size_t>(most * hidden));
  for (const std::int64_t m : rows) {
    if (m == 0 || first_.count(m) != 0) continue;
    const auto up = describe(m, hidden, 2 * inner_cols);
    first_[m] = {dnnl::matmul(up), memory(up.src_desc(), engine_, x.data()),
                 memory(up.dst_desc(), engine_, wide.data())};
    const auto back = describe(m, inner_cols, hidden);
    second_[m] = {dnnl::matmul(back), memory(back.src_desc(), engine_, inner.data()),
                  memory(back.dst_desc(), engine_, down.data())};
  }
}

/// Weights given as [cols, depth] into oneDNN's layout for [depth, cols].
memory OnednnProducts::packed(const std::vector<std::byte>& given, std::int64_t m,
                              std::int64_t depth, std::int64_t cols) {
  memory from({{depth, cols}, type_of(dtype()), memory::format_tag::ba}, engine_,
              const_cast<std::byte*>(given.data()));
  const memory::desc desc = describe(m, depth, cols).weights_desc();
  memory to(desc, engine_, memory_.emplace_back(desc.get_size()).data());
  dnnl::reorder(from, to).execute(stream_, from, to);
  stream_.wait();
  return to;
}

void OnednnProducts::pack_weights(const std::vector<std::int64_t>& rows) {
  const std::int64_t hidden = args_.config.hidden;
  const std::int64_t inner_cols = args_.config.inner;
  const auto matrix = static_cast<std::size_t>(hidden * inner_cols * size_of(dtype()));
  std::vector<std::byte> given(2 * matrix);
  w13_.resize(rows.size());
  w2_.resize(rows.size());
  for (std::size_t e = 0; e < rows.size(); ++e) {
    if (rows[e] == 0) continue;
    const auto expert = static_cast<std::int32_t>(e);
    const auto read = [&](ExpertPart part, std::int64_t count, std::size_t at) {
      args_.source->read(expert, part, 0, count, dtype(), given.data() + at);
    };
    read(ExpertPart::kGate, inner_cols, 0);
    read(ExpertPart::kUp, inner_cols, matrix);
    w13_[e] = packed(given, rows[e], hidden, 2 * inner_cols);
    read(ExpertPart::kDown, hidden, 0);
    w2_[e] = packed(given, rows[e], inner_cols, hidden);
  }
}

void OnednnProducts::execute(Product& product, const memory& weights) {
  product.primitive.execute(
      stream_,
      {{DNNL_ARG_SRC, product.in}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, product.out}});
  stream_.wait();
}

}  // namespace switchyard::bench

#endif
