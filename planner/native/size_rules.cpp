// Bytes of the outputs of common ops, from the shapes and types of their arguments.
//
// A rule knows what an op will allocate before it runs, or leaves it to PyTorch's meta and fake tensors, as where types would be
// promoted. These take a hundred times as long. Rules were written in Python: in a step of which each op has new sizes, as in a
// mixture of experts, they and the calls around them took a tenth of the time.

#include "op_records.h"

#include <ATen/core/enum_tag.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using Tensors = c10::SmallVector<at::Tensor, 8>;
using Shapes = c10::SmallVector<at::IntArrayRef, 8>;

// What a rule is asked about: the arguments of an op, and those of them that are tensors but no Python numbers.
struct Asked {
  const c10::FunctionSchema& schema;
  c10::ArrayRef<IValue> arguments;
  Tensors tensors;

  const at::Tensor& tensor(size_t i) const {
    return arguments[i].toTensor();
  }

  // Returns the value of an argument; None if the operator has no such argument.
  IValue named(const char* name) const {
    const auto found = schema.argumentIndexWithName(name);
    return found.has_value() ? arguments[static_cast<size_t>(*found)] : IValue();
  }

  int64_t item_bytes(const at::Tensor& like) const {
    const auto dtype = named("dtype");
    return static_cast<int64_t>(dtype.isNone() ? like.element_size() : c10::elementSize(dtype.toScalarType()));
  }
};

using SizeRule = ByteCounts (*)(const Asked&);

int64_t multiply(at::IntArrayRef sizes) {
  int64_t product = 1;
  for (const auto size : sizes) {
    product *= size;
  }
  return product;
}

// Returns the elements of a tensor of these shapes, broadcast.
int64_t count_broadcast_elements(const Shapes& shapes) {
  size_t dims = 0;
  for (const auto& shape : shapes) {
    dims = std::max(dims, shape.size());
  }
  int64_t elements = 1;
  for (size_t from_end = 1; from_end <= dims; ++from_end) {
    int64_t largest = 1;
    for (const auto& shape : shapes) {
      const auto size = from_end <= shape.size() ? shape[shape.size() - from_end] : 1;
      largest = size == 0 || largest == 0 ? 0 : std::max(largest, size);
    }
    elements *= largest;
  }
  return elements;
}

int64_t count_elements(const Asked& asked) {
  Shapes shapes;
  for (const auto& tensor : asked.tensors) {
    shapes.push_back(tensor.sizes());
  }
  return count_broadcast_elements(shapes);
}

ByteCounts count_nothing(const Asked&) {
  return {{}};
}

bool is_dtype(const c10::Argument& declared) {
  const auto type = declared.real_type();
  const auto* optional = type->castRaw<c10::OptionalType>();
  return (optional == nullptr ? type->kind() : optional->getElementType()->kind()) == c10::TypeKind::ScalarTypeType;
}

// Knows the bytes if one type decides: of the only real tensors, beside integers and numbers.
ByteCounts count_pointwise(const Asked& asked) {
  for (size_t i = 0; i < asked.arguments.size(); ++i) {
    const auto& value = asked.arguments[i];
    const bool is_complex = value.isComplexDouble() ||
        (value.isTensor() && value.toTensor().defined() && c10::isComplexType(value.toTensor().scalar_type()));
    if (is_complex || (!value.isNone() && is_dtype(asked.schema.arguments()[i]))) {
      return std::nullopt;
    }
  }
  const bool has_dims = std::any_of(asked.tensors.begin(), asked.tensors.end(), [](const auto& tensor) { return tensor.dim() > 0; });
  std::optional<c10::ScalarType> real;
  for (const auto& tensor : asked.tensors) {
    const auto type = tensor.scalar_type();
    if (c10::isComplexType(type)) {
      return std::nullopt;
    }
    if (c10::isFloatingType(type) && (tensor.dim() > 0 || !has_dims)) {
      if (real.has_value() && *real != type) {
        return std::nullopt;
      }
      real = type;
    }
  }
  if (!real.has_value()) {
    return std::nullopt;
  }
  return {{count_elements(asked) * static_cast<int64_t>(c10::elementSize(*real))}};
}

// At most the positions of all elements.
ByteCounts count_positions(const Asked& asked) {
  return {{asked.tensor(0).numel() * std::max<int64_t>(1, asked.tensor(0).dim()) * 8}};
}

ByteCounts count_truth_values(const Asked& asked) {
  return {{count_elements(asked)}};
}

// A tensor of the shape of the first argument.
ByteCounts count_like(const Asked& asked) {
  return {{asked.tensor(0).numel() * asked.item_bytes(asked.tensor(0))}};
}

// A tensor of the size that is the second argument, of the type of the first.
ByteCounts count_new(const Asked& asked) {
  return {{multiply(asked.arguments[1].toIntVector()) * asked.item_bytes(asked.tensor(0))}};
}

// The losses of all elements: a kernel that reduces them keeps their memory for the result.
ByteCounts count_loss(const Asked& asked) {
  const auto type = c10::promoteTypes(asked.tensor(0).scalar_type(), asked.tensor(1).scalar_type());
  return {{count_broadcast_elements({asked.tensor(0).sizes(), asked.tensor(1).sizes()}) * static_cast<int64_t>(c10::elementSize(type))}};
}

ByteCounts count_softmax(const Asked& asked) {
  return {{asked.tensor(0).numel() * (asked.arguments[2].toBool() ? 4 : static_cast<int64_t>(asked.tensor(0).element_size()))}};
}

// A tensor of the shape of the first argument, of the type that is the last.
ByteCounts count_softmax_gradient(const Asked& asked) {
  return {{asked.tensor(0).numel() * static_cast<int64_t>(c10::elementSize(asked.arguments[3].toScalarType()))}};
}

// The result, and mean and deviation of each row.
ByteCounts count_layer_norm(const Asked& asked) {
  const auto& value = asked.tensor(0);
  if (value.scalar_type() != at::kFloat && value.scalar_type() != at::kDouble) {
    return std::nullopt;
  }
  const auto rows = value.numel() / std::max<int64_t>(multiply(asked.arguments[1].toIntVector()), 1);
  const auto of_rows = rows * static_cast<int64_t>(value.element_size());
  return {{static_cast<int64_t>(value.nbytes()), of_rows, of_rows}};
}

ByteCounts count_concatenated(const Asked& asked) {
  int64_t size_bytes = 0;
  for (const auto& tensor : asked.tensors) {
    if (tensor.scalar_type() != asked.tensors[0].scalar_type()) {
      return std::nullopt;
    }
    size_bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return {{size_bytes}};
}

ByteCounts count_embedding(const Asked& asked) {
  const auto& table = asked.tensor(0);
  return {{asked.tensor(1).numel() * table.size(-1) * static_cast<int64_t>(table.element_size())}};
}

ByteCounts count_gathered(const Asked& asked) {
  return {{asked.tensor(2).numel() * static_cast<int64_t>(asked.tensor(0).element_size())}};
}

// The product of the last two tensors, or batches, of matrices.
ByteCounts count_product(const Asked& asked) {
  if (asked.tensors.size() < 2 || asked.tensors.end()[-2].dim() == 0) {
    return std::nullopt;
  }
  const auto& left = asked.tensors.end()[-2];
  const auto& right = asked.tensors.back();
  return {{multiply(left.sizes().slice(0, left.sizes().size() - 1)) * right.size(-1) * static_cast<int64_t>(left.element_size())}};
}

// A sum or mean over some dimensions, or over all.
ByteCounts count_reduced(const Asked& asked) {
  const auto& tensor = asked.tensor(0);
  const auto dtype = asked.named("dtype");
  const bool is_kept = tensor.is_floating_point() || tensor.is_complex();
  const auto type = !dtype.isNone() ? dtype.toScalarType() : is_kept ? tensor.scalar_type() : at::kLong;
  const auto over = asked.named("dim");
  std::vector<int64_t> dims;
  if (!over.isNone()) {
    dims = over.toIntVector();
  }
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim() && !dims.empty(); ++dim) {
    const auto is_it = [&](int64_t one) { return one == dim || one + tensor.dim() == dim; };
    elements *= std::any_of(dims.begin(), dims.end(), is_it) ? 1 : tensor.size(dim);
  }
  return {{elements * static_cast<int64_t>(c10::elementSize(type))}};
}

// A tensor that is indexed by tensors of indices; masks are not asked about.
ByteCounts count_indexed(const Asked& asked) {
  const auto& tensor = asked.tensor(0);
  const auto indices = asked.arguments[1].toListRef();
  Shapes chosen;
  int64_t others = 1;
  for (size_t dim = 0; dim < tensor.sizes().size(); ++dim) {
    if (dim < indices.size() && indices[dim].isTensor() && indices[dim].toTensor().defined()) {
      chosen.push_back(indices[dim].toTensor().sizes());
    } else {
      others *= tensor.sizes()[dim];
    }
  }
  return {{others * count_broadcast_elements(chosen) * static_cast<int64_t>(tensor.element_size())}};
}

// The rows, or other slices, that the third argument names.
ByteCounts count_selected(const Asked& asked) {
  const auto& tensor = asked.tensor(0);
  if (tensor.dim() == 0) {
    return std::nullopt;
  }
  int64_t elements = asked.tensor(2).numel();
  const auto selected = asked.arguments[1].toInt();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    elements *= dim == selected || dim == selected + tensor.dim() ? 1 : tensor.size(dim);
  }
  return {{elements * static_cast<int64_t>(tensor.element_size())}};
}

const std::vector<std::pair<SizeRule, std::vector<std::string_view>>>& named_rules() {
  static const auto& rules = *new std::vector<std::pair<SizeRule, std::vector<std::string_view>>>{
      {count_concatenated, {"cat"}},
      {count_embedding, {"embedding"}},
      {count_gathered, {"gather"}},
      {count_indexed, {"index"}},
      {count_layer_norm, {"native_layer_norm"}},
      {count_like, {"_to_copy", "clone", "empty_like", "flip", "index_add", "index_copy", "index_fill", "index_put", "ones_like", "roll",
                    "scatter", "scatter_add", "scatter_reduce", "tril", "triu", "zeros_like"}},
      {count_loss, {"binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss"}},
      {count_new, {"new_empty", "new_full", "new_ones", "new_zeros"}},
      {count_nothing, {"_unsafe_view"}},
      {count_positions, {"nonzero"}},
      {count_product, {"addmm", "baddbmm", "bmm", "mm"}},
      {count_reduced, {"mean", "sum"}},
      {count_selected, {"index_select"}},
      {count_softmax, {"_log_softmax", "_softmax"}},
      {count_softmax_gradient, {"_log_softmax_backward_data", "_softmax_backward_data"}},
      {count_truth_values, {"eq", "ge", "gt", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "le", "logical_and", "logical_not",
                            "logical_or", "logical_xor", "lt", "ne", "signbit"}}};
  return rules;
}

// Returns the rule for an operator; null if there is none.
SizeRule find_rule(const c10::OperatorHandle& handle) {
  const auto& returns = handle.schema().returns();
  if (std::all_of(returns.begin(), returns.end(), [](const auto& value) { return value.alias_info() != nullptr; })) {
    return count_nothing;
  }
  const std::string_view full = handle.operator_name().name;
  if (full.substr(0, 6) != "aten::" || handle.operator_name().overload_name == "dtype" ||
      handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    return nullptr;
  }
  const auto name = full.substr(6);
  for (const auto& [rule, names] : named_rules()) {
    if (std::find(names.begin(), names.end(), name) != names.end()) {
      return rule;
    }
  }
  const bool makes_one = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::TensorType;
  return makes_one && handle.hasTag(at::Tag::pointwise) ? count_pointwise : nullptr;
}

} // namespace

ByteCounts count_output_bytes(const CalledOp& called) {
  const auto rule = find_rule(called.handle);
  if (rule == nullptr) {
    return std::nullopt;
  }
  try {
    return rule({called.handle.schema(), called.arguments, {called.inputs.begin(), called.inputs.end()}});
  } catch (const c10::Error&) { // an argument of another type: the op raises its own error
    return std::nullopt;
  }
}
