#ifndef SWITCHYARD_TESTS_C_API_SUPPORT_H
#define SWITCHYARD_TESTS_C_API_SUPPORT_H

/* What the C99 programs of the tests share: descriptions of tensors, and the count of failures. */
#include <stdio.h>
#include <string.h>

#include "switchyard/switchyard.h"

static int failures = 0;

#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, sy_last_error()); \
      ++failures;                                                                  \
    }                                                                              \
  } while (0)

static sy_tensor tensor(void* data, int32_t ndim, const int64_t* shape, uint8_t code) {
  sy_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device_type = SY_DEVICE_CPU;
  t.ndim = ndim;
  t.type_code = code;
  t.type_bits = 32;
  t.type_lanes = 1;
  t.shape = shape;
  return t;
}

#endif /* SWITCHYARD_TESTS_C_API_SUPPORT_H */
