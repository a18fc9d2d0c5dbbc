"""Every C++ file includes what it uses of the standard library, {fmt} and nlohmann/json: itself, or
by a header of the project that it includes.

Builds that read several files as one, or headers compiled once, do not see what is missing, and a
build of each file by itself is what a user has. A name that the table below does not have is an
error too: it is added there."""

import os
import re
import unittest

from architecture_test import FILES, included, text_of

CODE = [f for f in FILES if f.endswith((".cpp", ".hpp"))]
SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"', re.S)
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.M)

# Headers that declare each of the names; several: any of them.
TABLE = """
algorithm: sort stable_sort min max clamp copy copy_n copy_if copy_backward fill fill_n find find_if any_of
    all_of none_of count count_if equal lower_bound upper_bound min_element max_element unique reverse
    rotate transform generate nth_element partial_sort is_sorted remove_if mismatch binary_search
    stable_partition for_each equal_range move_backward next_permutation replace search includes shuffle
    adjacent_find minmax_element pop_heap push_heap make_heap replace_if find_if_not partition set_difference lexicographical_compare swap_ranges ranges
array: array
atomic: atomic memory_order_acquire memory_order_release memory_order_relaxed memory_order_acq_rel
    memory_order_seq_cst memory_order atomic_thread_fence atomic_ref atomic_flag
bit: bit_cast bit_ceil bit_width bit_floor popcount countr_one countr_zero countl_zero has_single_bit
charconv: from_chars to_chars chars_format
charconv system_error: errc
cctype: isspace isdigit isalnum isalpha tolower toupper isxdigit isprint
chrono: chrono
cmath: sqrt exp log log2 log10 pow isfinite isnan isinf fabs floor ceil round fma signbit nextafter cos sin
    tanh lround llround expm1 log1p hypot erf erfc ldexp frexp remainder nearbyint nearbyintf trunc fmod
    lgamma exp2 copysign scalbn ilogb nan nanf atan cbrt logb modf
cmath cstdlib: abs
condition_variable: condition_variable condition_variable_any cv_status
csignal: signal sig_atomic_t raise
cstdio: FILE snprintf fopen fclose fflush fputs fputc fwrite fread fgetc fgets freopen printf fprintf perror
    rename fileno ferror feof
cstdlib: getenv exit malloc free strtol strtod strtoull strtoll abort atoi atexit aligned_alloc _Exit system
cstring: memcpy memset memcmp strlen strcmp strncmp memmove strerror strchr strstr memchr
ctime: tm time_t gmtime strftime gmtime_r
deque: deque
exception: exception_ptr current_exception rethrow_exception make_exception_ptr uncaught_exceptions
filesystem: filesystem
filesystem system_error: error_code
fstream: ifstream ofstream fstream
functional: function multiplies plus greater less_equal invoke reference_wrapper ref cref
functional string: hash
functional map set: less
iostream: cout cerr cin clog
ios iostream fstream sstream ostream istream: ios ios_base streamsize streamoff
iterator vector string map set span array: back_inserter back_insert_iterator istreambuf_iterator
    ostreambuf_iterator ssize next prev distance make_move_iterator inserter advance begin end size data
    input_iterator_tag forward_iterator_tag iterator_traits make_reverse_iterator
iosfwd istream iostream sstream fstream: istream
limits: numeric_limits
list: list
map: map multimap
memory: unique_ptr shared_ptr make_unique make_shared weak_ptr enable_shared_from_this align
    make_unique_for_overwrite dynamic_pointer_cast static_pointer_cast construct_at destroy_at addressof
    uninitialized_copy default_delete
mutex: mutex lock_guard unique_lock scoped_lock call_once once_flag recursive_mutex try_to_lock
new memory vector string: bad_alloc
new: align_val_t nothrow launder
numbers: numbers
numeric: accumulate iota inner_product gcd reduce partial_sum lcm
optional: optional nullopt make_optional in_place
iosfwd ostream iostream sstream fstream: ostream
ostream iostream sstream fstream: endl flush
random: mt19937 mt19937_64 uniform_int_distribution uniform_real_distribution normal_distribution
    random_device discrete_distribution bernoulli_distribution
regex: regex regex_match regex_search smatch regex_replace
set: set multiset
shared_mutex: shared_mutex shared_lock
span: span as_bytes as_writable_bytes dynamic_extent
sstream: ostringstream istringstream stringstream
stdexcept: runtime_error logic_error invalid_argument out_of_range length_error domain_error
string sstream filesystem fstream stdexcept: string string_literals
string: to_string getline stoi stod stoll stoull char_traits
system_error: system_error generic_category system_category
thread: thread this_thread jthread
tuple: tuple make_tuple apply tuple_size_v tuple_element_t forward_as_tuple
tuple map set: tie
typeindex: type_index
unordered_map: unordered_map
unordered_set: unordered_set
variant: variant visit get_if holds_alternative monostate variant_size_v variant_alternative_t
vector: vector
vector map set string: erase_if erase
"""
# What every header of the standard library brings along, and what is in a header by its type.
EVERYWHERE = set("""
int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t uintptr_t intptr_t size_t byte ptrdiff_t
nullptr_t uintmax_t intmax_t to_integer move forward exchange swap pair make_pair index_sequence make_index_sequence
integer_sequence make_integer_sequence as_const declval in_place_type in_place_type_t piecewise_construct
string_view initializer_list exception get is_same_v is_floating_point_v is_integral_v is_enum_v
is_signed_v is_unsigned_v is_const_v is_void_v is_pointer_v is_convertible_v is_constructible_v
is_trivially_copyable_v is_invocable_v is_invocable_r_v is_nothrow_move_constructible_v is_base_of_v
is_arithmetic_v is_constant_evaluated is_standard_layout_v
conditional_t decay_t remove_cvref_t remove_cv_t remove_const_t remove_reference_t remove_pointer_t
enable_if_t underlying_type_t make_unsigned_t make_signed_t void_t invoke_result_t type_identity_t
common_type_t integral_constant true_type false_type add_const_t is_same
integral floating_point same_as convertible_to invocable derived_from unsigned_integral
micro milli nano ratio terminate remove time
""".split())
OTHERS = {"fmt": re.compile(r"^fmt/"), "nlohmann": re.compile(r"^nlohmann/")}


def headers_of_names():
    table = {}
    for line in re.sub(r"\n    ", " ", TABLE).strip().splitlines():
        headers, names = line.split(":")
        for name in names.split():
            table[name] = set(headers.split())
    return table


def includes_of(path, text):
    """Of other libraries, and files of the project."""
    others, own = set(), set()
    for match in INCLUDE.finditer(text):
        if match.group(1) == "<":
            others.add(match.group(2))
        else:
            file = included(path, match.group(2))
            own |= {file} if file else set()
    return others, own


class Includes:
    def __init__(self, texts):
        self.own = {path: includes_of(path, text) for path, text in texts.items()}

    def reached(self, path):
        """Headers of other libraries that a file includes, or those of the project that it includes."""
        seen, todo, others = set(), [path], set()
        while todo:
            file = todo.pop()
            if file in seen or file not in self.own:
                continue
            seen.add(file)
            others |= self.own[file][0]
            todo += self.own[file][1]
        return others


def missing(texts):
    """Sentences: which file lacks what for which name."""
    table, includes, found = headers_of_names(), Includes(texts), []
    for path, text in sorted(texts.items()):
        code = SKIPPED.sub(" ", text)
        reached = includes.reached(path)
        for name in sorted(set(re.findall(r"\bstd::(\w+)", code)) - EVERYWHERE):
            if name not in table:
                found.append(f"{path}: std::{name} is not in the table of includes_test.py")
            elif not table[name] & reached:
                found.append(f"{path}: std::{name} without <{'> or <'.join(sorted(table[name]))}>")
        for library, header in OTHERS.items():
            if re.search(rf"\b{library}::", code) and not any(map(header.search, reached)):
                found.append(f"{path}: {library}:: without a header of it")
    return found


class IncludesTest(unittest.TestCase):
    def test_files_include_what_they_use(self):
        self.assertEqual(missing({path: text_of(path) for path in CODE}), [])

    def test_what_is_missing_is_found(self):
        uses = "void f() { std::vector<int> v; fmt::print(std::to_string(std::ssize(v))); }"
        self.assertEqual(missing({"src/core/a.cpp": "#include <vector>\n#include <fmt/core.h>\n" + uses}),
                         ["src/core/a.cpp: std::to_string without <string>"])
        self.assertEqual(missing({"src/core/a.cpp": "#include <string>\n#include <vector>\n" + uses}),
                         ["src/core/a.cpp: fmt:: without a header of it"])
        self.assertEqual(missing({"src/core/a.cpp": "// std::vector\nstd::unheard_of x;"}),
                         ["src/core/a.cpp: std::unheard_of is not in the table of includes_test.py"])
        header = os.path.join("src", "core", "error.cpp")
        self.assertEqual(missing({header: '#include "core/printable.hpp"\nstd::map<int, int> m;'}),
                         [f"{header}: std::map without <map>"])


if __name__ == "__main__":
    unittest.main()
