// Dense products of a model on a GPU, against plain loops in double, and their bits.
#include "core/gpu/dense/products.hpp"

#include "tests/cuda/models/typed.hpp"

namespace switchyard::models::gpu {
namespace {

struct Sizes {
  std::int64_t rows, in, out;
};

/// sum over k of a(i, k) b(k, j) for all i, j.
template <class A, class B>
Doubles product(std::int64_t rows, std::int64_t depth, std::int64_t cols, const A& a, const B& b) {
  Doubles out;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < depth; ++k) sum += a(i, k) * b(k, j);
      out.push_back(sum);
    }
  }
  return out;
}

void expect_products(DenseProducts& products, const Sizes& s, bool bf16) {
  SCOPED_TRACE(testing::Message() << s.rows << " x " << s.in << " x " << s.out
                                  << (bf16 ? " bf16" : " f32"));
  const Typed x(bf16, random_floats(s.rows * s.in, 1)), w(bf16, random_floats(s.in * s.out, 2));
  const Typed dy(bf16, random_floats(s.rows * s.out, 3));
  const Typed y(bf16, s.rows * s.out), dx(bf16, s.rows * s.in);
  const DeviceArray<float> dw(static_cast<std::size_t>(s.in * s.out));
  const Typed wide(false, s.rows * s.out);
  products.forward({x.data(), bf16}, {w.data(), bf16}, {y.data(), bf16}, s.rows, s.in, s.out,
                   nullptr);
  products.forward({x.data(), bf16}, {w.data(), bf16}, {wide.data(), false}, s.rows, s.in, s.out,
                   nullptr);
  products.backward_input({dy.data(), bf16}, {w.data(), bf16}, {dx.data(), bf16}, s.rows, s.in,
                          s.out, nullptr);
  const Doubles want_y = product(
      s.rows, s.in, s.out, [&](auto i, auto k) { return x[i * s.in + k]; },
      [&](auto k, auto j) { return w[j * s.in + k]; });
  expect_close(y.get(), want_y, bound_of(bf16), "y");
  expect_close(wide.get(), want_y, 1e-4, "y in f32");
  expect_close(dx.get(),
               product(
                   s.rows, s.out, s.in, [&](auto i, auto k) { return dy[i * s.out + k]; },
                   [&](auto k, auto j) { return w[k * s.in + j]; }),
               bound_of(bf16), "dx");
  Doubles want = product(
      s.out, s.rows, s.in, [&](auto i, auto k) { return dy[k * s.out + i]; },
      [&](auto k, auto j) { return x[k * s.in + j]; });
  for (const bool accumulate : {false, true}) {
    products.backward_weights({dy.data(), bf16}, {x.data(), bf16}, {dw.data(), false}, s.rows, s.in,
                              s.out, accumulate, nullptr);
    const std::vector<float> got = dw.get();
    expect_close(got, want, 2e-4, "dw");
    for (double& value : want) value *= 2;
    if (accumulate) continue;
    for (int again = 0; again < 3; ++again) {
      products.backward_weights({dy.data(), bf16}, {x.data(), bf16}, {dw.data(), false}, s.rows,
                                s.in, s.out, false, nullptr);
      EXPECT_EQ(dw.get(), got);
    }
  }
}

TEST(ModelDense, SmallProductsAreThoseInDouble) {
  DenseProducts products;
  for (const bool bf16 : {false, true}) {
    expect_products(products, {1, 8, 8}, bf16);
    expect_products(products, {7, 64, 24}, bf16);
    expect_products(products, {65, 40, 37}, bf16);  // a vocabulary that no tile divides
  }
}
TEST(ModelDense, ProductsOfManyRowsAreThoseInDoubleAndAlwaysHaveTheSameBits) {
  DenseProducts products;
  for (const bool bf16 : {false, true}) expect_products(products, {2050, 128, 192}, bf16);
}

}  // namespace
}  // namespace switchyard::models::gpu
