#include "ops/tensors.h"

namespace swarm_kv::ops {

const char* error_class(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kArgument:
      return "ArgumentError";
    case ErrorKind::kStorage:
      return "StorageError";
    case ErrorKind::kCapacity:
      return "CapacityError";
    case ErrorKind::kState:
      return "StateError";
  }
  return "SwarmError";
}

const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(dtype);
  }
}

std::ostream& operator<<(std::ostream& stream, const Description& description) {
  stream << dtype_name(description.tensor.scalar_type()) << " [";
  const auto sizes = description.tensor.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) stream << (i == 0 ? "" : ", ") << sizes[i];
  return stream << "]";
}

bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

Element element_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return Element::kFloat16;
    case ScalarType::BFloat16:
      return Element::kBFloat16;
    case ScalarType::Double:
      return Element::kFloat64;
    default:
      return Element::kFloat32;
  }
}

ScalarType accumulation_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

const Argument& Argument::dim(int64_t expected) const {
  check(tensor.dim() == expected, op, ": ", name, " must have ", expected, " dimensions, got ",
        describe(tensor));
  return *this;
}

const Argument& Argument::size(int64_t axis, int64_t expected, const char* meaning) const {
  check(tensor.size(axis) == expected, op, ": ", name, " must have ", meaning, " = ", expected,
        " in dimension ", axis, ", got ", describe(tensor));
  return *this;
}

const Argument& Argument::dtype(ScalarType expected) const {
  check(tensor.scalar_type() == expected, op, ": ", name, " must be ", dtype_name(expected),
        ", got ", describe(tensor));
  return *this;
}

const Argument& Argument::floating() const {
  check(is_floating(tensor.scalar_type()), op, ": ", name,
        " must be float16, bfloat16, float32 or float64, got ", describe(tensor));
  return *this;
}

const Argument& Argument::on_cpu() const {
  check(tensor.is_cpu(), op, ": ", name, " must be on the CPU; move it with .cpu()");
  return *this;
}

void check_on_cpu(const char* op, std::initializer_list<Named> arguments) {
  for (const Named& one : arguments) Argument{op, one.name, one.tensor}.on_cpu();
}

void check_on_one_gpu(const char* op, std::initializer_list<Named> arguments) {
  const Named& first = *arguments.begin();
  check(first.tensor.is_cuda(), op, ": ", first.name,
        " must be on a CUDA device like the other arguments; move it with .cuda()");
  for (const Named& one : arguments) {
    check(one.tensor.is_cuda() && one.tensor.get_device_index() == first.tensor.get_device_index(),
          op, ": ", one.name, " must be on the CUDA device of ", first.name, ", number ",
          first.tensor.get_device_index(), "; move it with .to(", first.name, ".device)");
  }
}

Tensor as_contiguous(const Tensor& tensor, ScalarType dtype) {
  Tensor result = tensor;
  if (result.scalar_type() != dtype) result = torch::stable::to(result, dtype);
  if (!result.is_contiguous()) result = torch::stable::contiguous(result);
  return result;
}

Tensor empty_cpu(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::empty({sizes.begin(), sizes.size()}, dtype,
                              torch::headeronly::Layout::Strided,
                              torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

Tensor int32_tensor(const std::vector<int32_t>& values) {
  Tensor result = empty_cpu({static_cast<int64_t>(values.size())}, ScalarType::Int);
  std::copy(values.begin(), values.end(), static_cast<int32_t*>(result.mutable_data_ptr()));
  return result;
}

}  // namespace swarm_kv::ops
