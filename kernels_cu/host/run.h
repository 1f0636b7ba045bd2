// fx_fuser::run on CUDA: calls a function whose arguments, except tensors and sizes, are encoded in
// a string, the program. fx_fuser/ops/run.py documents the reason and the format.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/attention.h"
#include "host/conv.h"
#include "host/conv1d.h"
#include "host/conv_backward.h"
#include "host/depthwise_gradients.h"
#include "host/folded.h"
#include "host/gather_rows.h"
#include "host/grouped_gradients.h"
#include "host/linear.h"
#include "host/made.h"
#include "host/pixels.h"

namespace fx_fuser {
namespace {

// The tensors and sizes of one call.
struct Given {
  const std::vector<Tensor>& t;
  const std::vector<int64_t>& sizes;
};

// Reads a program's words one after the other.
class ProgramText {
 public:
  explicit ProgramText(std::string_view text) : whole_(text), left_(text) {}

  // Up to the next space.
  std::string_view word() {
    const size_t end = std::min(left_.find(' '), left_.size());
    const std::string_view found = left_.substr(0, end);
    left_.remove_prefix(std::min(end + 1, left_.size()));
    return found;
  }

  // The rest of a word that begins with this letter.
  std::string_view word(char kind) {
    require(!left_.empty() && left_[0] == kind);
    left_.remove_prefix(1);
    return word();
  }

  bool next_is(char kind) const { return !left_.empty() && left_[0] == kind; }

  template <class Number>
  Number number(char kind, int base = 10) {
    const std::string_view digits = word(kind);
    return number_of<Number>(digits, base);
  }

  std::string string() {
    require(next_is('s'));
    left_.remove_prefix(1);
    const size_t colon = left_.find(':');
    require(colon != std::string_view::npos);
    const auto length = number_of<size_t>(left_.substr(0, colon), 10);
    left_.remove_prefix(colon + 1);
    require(length <= left_.size());
    std::string found(left_.substr(0, length));
    left_.remove_prefix(std::min(length + 1, left_.size()));
    return found;
  }

  size_t tensor() {
    require(word('t').empty());
    return tensors_++;
  }

  size_t size() {
    require(word('n').empty());
    return sizes_++;
  }

  // How many tensors and sizes were read.
  size_t tensors() const { return tensors_; }
  size_t sizes() const { return sizes_; }

  void require(bool is_right) const {
    STD_TORCH_CHECK(is_right, "fx_fuser: run cannot read its program: ", whole_, ", from byte ",
                    whole_.size() - left_.size());
  }

  bool is_read() const { return left_.empty(); }

 private:
  template <class Number>
  Number number_of(std::string_view digits, int base) const {
    Number value{};
    const char* end = digits.data() + digits.size();
    const auto [stop, error] = std::from_chars(digits.data(), end, value, base);
    require(error == std::errc() && stop == end);
    return value;
  }

  std::string_view whole_;
  std::string_view left_;
  size_t tensors_ = 0;
  size_t sizes_ = 0;
};

// A function's argument, parsed from the program; of(given) is its value in a call.
template <class T>
class Argument {
 public:
  explicit Argument(ProgramText& text) : value_(read(text)) {}
  const T& of(const Given& /*given*/) const { return value_; }

 private:
  static T read(ProgramText& text) {
    if constexpr (std::is_same_v<T, bool>) {
      return text.number<int>('b') != 0;
    } else if constexpr (std::is_same_v<T, double>) {
      const auto bits = text.number<uint64_t>('f', 16);
      double value = 0;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    } else if constexpr (std::is_same_v<T, std::string>) {
      return text.string();
    } else if constexpr (std::is_same_v<T, ScalarType>) {
      return scalar_type_of(std::string(text.word('d')));
    } else {
      T found;
      for (auto left = text.number<size_t>('#'); left > 0; --left) {
        found.push_back(Argument<typename T::value_type>(text).of({{}, {}}));
      }
      return found;
    }
  }

  T value_;
};

template <>
class Argument<int64_t> {
 public:
  explicit Argument(ProgramText& text) {
    if (text.next_is('n')) {
      place_ = text.size();
    } else {
      value_ = text.number<int64_t>('i');
    }
  }
  int64_t of(const Given& given) const { return place_ ? given.sizes[*place_] : value_; }
  bool is_size() const { return place_.has_value(); }

 private:
  std::optional<size_t> place_;
  int64_t value_ = 0;
};

// Copied only if one of the elements is a size.
template <>
class Argument<std::vector<int64_t>> {
 public:
  struct Ints {
    std::optional<std::vector<int64_t>> made;
    const std::vector<int64_t>& held;
    operator const std::vector<int64_t>&() const { return made ? *made : held; }
  };

  explicit Argument(ProgramText& text) {
    for (auto left = text.number<size_t>('#'); left > 0; --left) {
      const Argument<int64_t>& word = words_.emplace_back(text);
      has_sizes_ |= word.is_size();
      held_.push_back(word.is_size() ? 0 : word.of({{}, {}}));
    }
  }
  Ints of(const Given& given) const {
    Ints found{std::nullopt, held_};
    if (has_sizes_) {
      found.made.emplace();
      for (const auto& word : words_) found.made->push_back(word.of(given));
    }
    return found;
  }

 private:
  std::vector<Argument<int64_t>> words_;
  std::vector<int64_t> held_;
  bool has_sizes_ = false;
};

template <>
class Argument<Tensor> {
 public:
  explicit Argument(ProgramText& text) : place_(text.tensor()) {}
  const Tensor& of(const Given& given) const { return given.t[place_]; }

 private:
  size_t place_;
};

template <>
class Argument<std::optional<Tensor>> {
 public:
  explicit Argument(ProgramText& text) {
    if (text.next_is('-')) {
      text.require(text.word('-').empty());
    } else {
      place_ = text.tensor();
    }
  }
  std::optional<Tensor> of(const Given& given) const {
    return place_ ? std::optional(given.t[*place_]) : std::nullopt;
  }

 private:
  std::optional<size_t> place_;
};

template <>
class Argument<std::vector<Tensor>> {
 public:
  explicit Argument(ProgramText& text) : first_(text.tensors()), count_(text.number<size_t>('#')) {
    for (size_t i = 0; i < count_; ++i) text.tensor();
  }
  std::vector<Tensor> of(const Given& given) const {
    const auto first = given.t.begin() + static_cast<std::ptrdiff_t>(first_);
    return {first, first + static_cast<std::ptrdiff_t>(count_)};
  }

 private:
  size_t first_;
  size_t count_;
};

struct Program {
  size_t tensors = 0;
  size_t sizes = 0;
  // std::nullopt if the function does not support these tensors.
  std::function<std::optional<Made>(const Given&)> run;
};

template <class Result, class... Arguments>
Program program_of(Result (*function)(Arguments...), ProgramText& text) {
  // Braces, not parentheses: they guarantee evaluation in the program's order.
  std::tuple<Argument<std::decay_t<Arguments>>...> held{Argument<std::decay_t<Arguments>>(text)...};
  text.require(text.is_read());
  return {text.tensors(), text.sizes(), [function, held = std::move(held)](const Given& given) {
            return std::apply(
                [&](const auto&... argument) -> std::optional<Made> {
                  return function(argument.of(given)...);
                },
                held);
          }};
}

Program program_of(const std::string& program) {
  ProgramText text(program);
  const std::string_view name = text.word();
  if (name == "linear") return program_of(make_linear, text);
  if (name == "matmul") return program_of(make_matmul, text);
  if (name == "bmm") return program_of(make_bmm, text);
  if (name == "attention") return program_of(make_attention, text);
  if (name == "attention_backward") return program_of(make_attention_backward, text);
  if (name == "attention_bias") return program_of(make_attention_bias, text);
  if (name == "attention_bias_backward") return program_of(make_attention_bias_backward, text);
  if (name == "attention_window") return program_of(make_attention_window, text);
  if (name == "attention_window_backward") {
    return program_of(make_attention_window_backward, text);
  }
  if (name == "gather_rows") return program_of(make_gather_rows, text);
  if (name == "gather_rows_order") return program_of(make_gather_rows_order, text);
  if (name == "gather_rows_backward") return program_of(make_gather_rows_backward, text);
  if (name == "conv1d") return program_of(make_conv1d, text);
  if (name == "conv1d_weight") return program_of(make_conv1d_weight, text);
  if (name == "conv2d") return program_of(make_conv2d, text);
  if (name == "conv2d_batchnorm") return program_of(make_conv2d_batchnorm, text);
  if (name == "conv2d_backward") return program_of(conv2d_backward, text);
  if (name == "conv2d_batchnorm_backward") return program_of(conv2d_batchnorm_backward, text);
  if (name == "conv2d_moments") return program_of(make_pixels, text);
  if (name == "conv2d_folded") return program_of(conv2d_folded, text);
  if (name == "depthwise") return program_of(make_depthwise, text);
  if (name == "depthwise_input") return program_of(make_depthwise_input, text);
  if (name == "depthwise_weight") return program_of(make_depthwise_weight, text);
  if (name == "grouped") return program_of(make_grouped, text);
  if (name == "grouped_input") return program_of(make_grouped_input, text);
  if (name == "grouped_weight") return program_of(make_grouped_weight, text);
  STD_TORCH_CHECK(false, "fx_fuser: run knows no function ", name);
}

// Each program is parsed once. References stay valid: nothing is ever erased.
const Program& known_program(const std::string& program) {
  static std::mutex mutex;
  static std::unordered_map<std::string, Program> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(program);
  return found != known.end() ? found->second
                              : known.emplace(program, program_of(program)).first->second;
}

Made made_in_torch(const Given& given, const std::string& program) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(given.t), from(program), from(given.sizes)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("fx_fuser::run", "in_torch", stack.data(), TORCH_ABI_VERSION));
  return Made(torch::stable::detail::to<std::vector<Tensor>>(stack[0]));
}

Made made_by(const Given& given, const std::string& program) {
  const Program& known = known_program(program);
  STD_TORCH_CHECK(given.t.size() == known.tensors && given.sizes.size() == known.sizes,
                  "fx_fuser: run has ", given.t.size(), " tensors and ", given.sizes.size(),
                  " sizes, not ", known.tensors, " and ", known.sizes);
  std::optional<Made> made = known.run(given);
  return made ? *std::move(made) : made_in_torch(given, program);
}

Tensor run(const std::vector<Tensor>& t, const std::string& program) {
  return made_by({t, {}}, program).y;
}

std::vector<Tensor> run_many(const std::vector<Tensor>& t, const std::string& program,
                             const std::optional<std::vector<int64_t>>& sizes) {
  return made_by({t, sizes.value_or(std::vector<int64_t>())}, program).all();
}

}  // namespace
}  // namespace fx_fuser
