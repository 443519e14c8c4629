// npu_prompt_cache._core: the C++ cache for Python. Converts arguments and errors, and releases the GIL
// around every call that may wait or copy; nothing else.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstring>

#include "cpu/decode_attention.h"
#include "device/dlpack.h"
#include "device/prompt_cache.h"

namespace py = pybind11;
using npc::BlockId;
using npc::Token;
using npc::device::LeaseHandle;
using npc::device::PromptCache;

namespace {

// ---- token ids ----

[[noreturn]] void bad_token(Py_ssize_t index, const std::string& value) {
  throw py::value_error("token_ids[" + std::to_string(index) + "] = " + value +
                        ": token ids are integers from 0 to 2147483647");
}

template <typename Integer>
bool is_token(Integer value) {
  // A negative id becomes a huge one: one comparison, and a loop that the compiler can vectorise.
  return static_cast<uint64_t>(static_cast<int64_t>(value)) <= 0x7fffffffU;
}

template <typename Integer>
std::vector<Token> narrow(const py::buffer_info& info) {
  std::vector<Integer> gathered;
  const auto* values = static_cast<const Integer*>(info.ptr);
  bool is_plain =
      info.strides[0] == sizeof(Integer) && reinterpret_cast<uintptr_t>(values) % alignof(Integer) == 0;
  if (!is_plain) {
    gathered.resize(static_cast<size_t>(info.size));
    for (py::ssize_t i = 0; i < info.size; ++i)
      std::memcpy(&gathered[i], static_cast<const char*>(info.ptr) + i * info.strides[0], sizeof(Integer));
    values = gathered.data();
  }
  std::vector<Token> tokens(static_cast<size_t>(info.size));
  bool good = true;
  for (py::ssize_t i = 0; i < info.size; ++i) {
    good &= is_token(values[i]);
    tokens[i] = static_cast<Token>(values[i]);
  }
  for (py::ssize_t i = 0; !good; ++i) {
    if (!is_token(values[i])) bad_token(i, std::to_string(values[i]));
  }
  return tokens;
}

std::vector<Token> tokens_of_buffer(const py::buffer& buffer) {
  py::buffer_info info = buffer.request();
  if (info.ndim != 1)
    throw py::value_error("token_ids has " + std::to_string(info.ndim) +
                          " dimensions: a prompt is one sequence of ids; pass rows of a batch one by one");
  if (info.format.size() == 1) {
    switch (info.format[0]) {
      case 'b':
        return narrow<signed char>(info);
      case 'B':
        return narrow<unsigned char>(info);
      case 'h':
        return narrow<short>(info);
      case 'H':
        return narrow<unsigned short>(info);
      case 'i':
        return narrow<int>(info);
      case 'I':
        return narrow<unsigned int>(info);
      case 'l':
        return narrow<long>(info);
      case 'L':
        return narrow<unsigned long>(info);
      case 'q':
        return narrow<long long>(info);
      case 'Q':
        return narrow<unsigned long long>(info);
      default:
        break;
    }
  }
  throw py::type_error("token_ids is an array of format '" + info.format +
                       "': token ids are integers, native byte order");
}

Token token_of_item(PyObject* item, Py_ssize_t index) {
  if (PyBool_Check(item) || !PyIndex_Check(item))
    throw py::type_error("token_ids[" + std::to_string(index) + "] is a " + Py_TYPE(item)->tp_name +
                         ": token ids are integers");
  py::object integer = py::reinterpret_steal<py::object>(PyNumber_Index(item));
  if (!integer) throw py::error_already_set();
  int overflow = 0;
  long long value = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
  if (overflow != 0 || value < 0 || value > 0x7fffffff) bad_token(index, py::str(integer));
  return static_cast<Token>(value);
}

std::vector<Token> tokens_of_sequence(PyObject* sequence) {
  Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
  std::vector<Token> tokens(static_cast<size_t>(count));
  py::object held;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(sequence, i);
    int overflow = 1;
    long value = PyLong_CheckExact(item) ? PyLong_AsLongAndOverflow(item, &overflow) : 0;
    if (overflow == 0 && value >= 0 && value <= 0x7fffffff) {
      tokens[i] = static_cast<Token>(value);
      continue;
    }
    if (!held) {  // what follows may run Python code, which may change a list: go on with a copy
      held = py::reinterpret_steal<py::object>(PySequence_Tuple(sequence));
      if (!held) throw py::error_already_set();
      sequence = held.ptr();
      item = PySequence_Fast_GET_ITEM(sequence, i);
    }
    tokens[i] = token_of_item(item, i);
  }
  return tokens;
}

// A list, a tuple, or a one-dimensional buffer of integers. Always a copy: the caller may go on and change
// its own.
std::vector<Token> tokens_of(const py::object& ids) {
  std::vector<Token> tokens;
  if (PyList_Check(ids.ptr()) || PyTuple_Check(ids.ptr())) {
    tokens = tokens_of_sequence(ids.ptr());
  } else if (PyObject_CheckBuffer(ids.ptr()) && !PyBytes_Check(ids.ptr()) && !PyByteArray_Check(ids.ptr())) {
    tokens = tokens_of_buffer(py::reinterpret_borrow<py::buffer>(ids));
  } else {
    throw py::type_error(std::string("token_ids is a ") + Py_TYPE(ids.ptr())->tp_name +
                         ": pass a list, a tuple, an integer array or a torch tensor");
  }
  if (tokens.empty()) throw py::value_error("token_ids is empty: a prompt has at least one token");
  return tokens;
}

// ---- results ----

template <typename Number>
py::array_t<Number> array_of(const std::vector<Number>& values) {
  return py::array_t<Number>(static_cast<py::ssize_t>(values.size()), values.data());
}

template <typename Call>
auto without_gil(Call&& call) {
  py::gil_scoped_release release;
  return call();
}

npc::acl::Stream stream_of(uintptr_t handle) { return reinterpret_cast<npc::acl::Stream>(handle); }

// At least one token is always computed.
int64_t checked_limit(int64_t limit, int64_t count) {
  if (limit < 0) throw py::value_error("limit=" + std::to_string(limit) + ": at least 0 tokens");
  return std::min(limit, count - 1);
}

npc::EntryOptions options_of(int64_t priority) {
  constexpr auto most = static_cast<int64_t>(npc::kPriorities) - 1;
  if (priority < 0 || priority > most)
    throw py::value_error("priority=" + std::to_string(priority) + " is not in [0, " + std::to_string(most) +
                          "]");
  return {static_cast<npc::Priority>(priority)};
}

using Leases = std::vector<std::shared_ptr<LeaseHandle>>;
using Numbers = py::array_t<int64_t>;

// The leases, tokens of each that are not to be computed, and what is to be written twice: see
// npc::AcquiredBatch.
py::typing::Tuple<Leases, Numbers, Numbers, Numbers> acquire_batch(PromptCache& cache,
                                                                   const py::bytes& name_space,
                                                                   const std::vector<py::object>& rows,
                                                                   const std::vector<int64_t>& limits,
                                                                   uintptr_t stream, int64_t priority) {
  const npc::EntryOptions options = options_of(priority);
  if (rows.empty() || rows.size() != limits.size())
    throw py::value_error(std::to_string(rows.size()) + " prompts with " + std::to_string(limits.size()) +
                          " limits: at least one prompt, and a limit for each");
  std::string_view root = name_space;
  std::vector<std::vector<Token>> tokens;
  std::vector<npc::Prompt> prompts;
  for (size_t row = 0; row < rows.size(); ++row) {
    tokens.push_back(tokens_of(rows[row]));
    auto count = static_cast<int64_t>(tokens.back().size());
    prompts.push_back({tokens.back().data(), count, checked_limit(limits[row], count)});
  }
  npc::device::Batch batch =
      without_gil([&] { return cache.acquire(root, prompts, stream_of(stream), options); });
  return py::make_tuple(std::move(batch.leases), array_of(batch.starts), array_of(batch.copy_sources),
                        array_of(batch.copy_slots));
}

struct PlaneView {
  npc::device::DLManagedTensor managed;
  std::vector<int64_t> shape;
  std::shared_ptr<npc::device::Region> region;  // the memory lives as long as the tensor
};

void free_unused_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;  // taken: the consumer calls the deleter
  auto* managed = static_cast<npc::device::DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

py::capsule plane_capsule(const PromptCache& cache, size_t plane, const std::vector<int64_t>& shape,
                          uint8_t code, uint8_t bits, int32_t device_type, int32_t device_id) {
  auto view = std::make_unique<PlaneView>();
  view->region = without_gil([&] { return cache.region(); });
  view->shape = shape;
  view->managed.dl_tensor = {view->region->plane(plane),
                             {device_type, device_id},
                             static_cast<int32_t>(shape.size()),
                             {code, bits, 1},
                             view->shape.data(),
                             nullptr,
                             0};
  view->managed.manager_ctx = view.get();
  view->managed.deleter = [](npc::device::DLManagedTensor* self) {
    delete static_cast<PlaneView*>(self->manager_ctx);
  };
  PyObject* capsule = PyCapsule_New(&view->managed, "dltensor", free_unused_capsule);
  if (capsule == nullptr) throw py::error_already_set();
  view.release();
  return py::reinterpret_steal<py::capsule>(capsule);
}

py::typing::Dict<py::str, py::object> stats_of(const PromptCache& cache) {
  npc::CacheStats s = without_gil([&] { return cache.stats(); });
  auto copies = without_gil([&] { return cache.copies(); });
  py::typing::Dict<py::str, py::object> out;
  out["lookups"] = s.lookups;
  out["hits"] = s.hits;
  out["lookup_tokens"] = s.lookup_tokens;
  out["hit_tokens"] = s.hit_tokens;
  out["computed_tokens"] = s.computed_tokens;
  out["committed_blocks"] = s.committed_blocks;
  out["evicted_blocks"] = s.evicted_blocks;
  out["superseded_blocks"] = s.superseded_blocks;
  out["entries"] = s.entries;
  out["pinned_entries"] = s.pinned_entries;
  out["pinned_bytes"] = s.blocks_of_pins * cache.block_bytes();
  out["leases"] = s.leases;
  out["free_bytes"] = s.free_blocks * cache.block_bytes();
  out["leased_bytes"] = s.leased_blocks * cache.block_bytes();
  out["cached_bytes"] = s.cached_blocks * cache.block_bytes();
  out["fenced_bytes"] = s.fenced_blocks * cache.block_bytes();
  out["pool_bytes"] = s.usable_blocks * cache.block_bytes();
  const char* kinds[] = {"H2H", "H2D", "D2H", "D2D"};
  py::dict calls, bytes;
  for (size_t kind = 0; kind < copies.size(); ++kind) {
    calls[kinds[kind]] = copies[kind].calls;
    bytes[kinds[kind]] = copies[kind].bytes;
  }
  out["copies"] = calls;
  out["copy_bytes"] = bytes;
  return out;
}

// ---- errors ----

void set_python_error(const char* type, const std::string& message) {
  py::object error = py::module_::import("npu_prompt_cache.errors").attr(type)(message);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const npc::acl::AclError& error) {
    py::object made = py::module_::import("npu_prompt_cache.errors")
                          .attr("AclError")(error.what(), error.code(), npc::acl::error_name(error.code()));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  } catch (const npc::acl::RuntimeNotFound& error) {
    set_python_error("RuntimeNotFound", error.what());
  } catch (const npc::PoolExhausted& error) {
    set_python_error("PoolExhausted", error.what());
  } catch (const npc::PinLimitExceeded& error) {
    set_python_error("PinLimitExceeded", error.what());
  } catch (const npc::CacheClosed& error) {
    set_python_error("CacheClosed", error.what());
  } catch (const npc::LeaseReleased& error) {
    set_python_error("LeaseReleased", error.what());
  } catch (const npc::IntegrityError& error) {
    set_python_error("IntegrityError", error.what());
  }
}

// ---- attention on the CPU ----

using Int64s = py::array_t<int64_t, py::array::c_style>;

void decode_attention(uintptr_t query, uintptr_t keys, uintptr_t values, uintptr_t out,
                      const py::array_t<int32_t, py::array::c_style>& blocks, const Int64s& first,
                      const Int64s& last, int32_t heads, int32_t kv_heads, int32_t key_dim, int32_t value_dim,
                      int64_t block_size, float scale, int32_t threads) {
  const npc::cpu::DecodeShape shape{heads, kv_heads, key_dim, value_dim, block_size, blocks.shape(1)};
  without_gil([&] {
    npc::cpu::decode_attention(shape, reinterpret_cast<const float*>(query),
                               reinterpret_cast<const float*>(keys), reinterpret_cast<const float*>(values),
                               blocks.data(), first.data(), last.data(), first.shape(0), scale, threads,
                               reinterpret_cast<float*>(out));
  });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of npu_prompt_cache. Use the classes of the package, which document and type it.";
  py::register_exception_translator(&translate);
  m.def("process_is_exiting", &npc::device::Runtime::process_is_exiting,
        "From here on no destructor calls the Ascend runtime, which may be gone.");
  m.def(
      "tokens", [](const py::object& ids) { return array_of(tokens_of(ids)); }, py::arg("token_ids"),
      "Token ids checked and copied to an int32 array.");

  m.def("decode_attention", &decode_attention, py::arg("query"), py::arg("keys"), py::arg("values"),
        py::arg("out"), py::arg("blocks"), py::arg("first"), py::arg("last"), py::arg("heads"),
        py::arg("kv_heads"), py::arg("key_dim"), py::arg("value_dim"), py::arg("block_size"),
        py::arg("scale"), py::arg("threads"),
        "Attention of one new token a sequence, float32; tensors by their addresses. See "
        "csrc/cpu/decode_attention.h.");
  m.def(
      "write_rows",
      [](uintptr_t states, uintptr_t plane, const Int64s& slots, size_t row_bytes) {
        npc::cpu::write_rows(reinterpret_cast<const void*>(states), reinterpret_cast<void*>(plane),
                             slots.data(), slots.shape(0), row_bytes);
      },
      py::arg("states"), py::arg("plane"), py::arg("slots"), py::arg("row_bytes"),
      "Copies rows of one tensor to given rows of another, by their addresses.");
  m.attr("DECODE_LANES") = npc::cpu::kLanes;
  m.attr("PRIORITIES") = npc::kPriorities;

  py::class_<LeaseHandle, std::shared_ptr<LeaseHandle>>(m, "Lease")
      .def_property_readonly("cached_tokens", &LeaseHandle::cached_tokens)
      .def_property_readonly(
          "length", [](const LeaseHandle& lease) { return without_gil([&] { return lease.length(); }); })
      .def_property_readonly(
          "released", [](const LeaseHandle& lease) { return without_gil([&] { return lease.released(); }); })
      .def(
          "block_table",
          [](const LeaseHandle& lease) { return array_of(without_gil([&] { return lease.block_table(); })); })
      .def(
          "slots",
          [](const LeaseHandle& lease, int64_t start, int64_t stop) {
            return array_of(without_gil([&] { return lease.slots(start, stop); }));
          },
          py::arg("start"), py::arg("stop"))
      .def("extend", &LeaseHandle::extend, py::arg("count"), py::call_guard<py::gil_scoped_release>())
      .def(
          "commit",
          [](LeaseHandle& lease, const py::object& ids) {
            std::vector<Token> tokens = tokens_of(ids);
            py::gil_scoped_release release;
            return lease.commit(tokens.data(), static_cast<int64_t>(tokens.size()));
          },
          py::arg("token_ids"))
      .def("fork", &LeaseHandle::fork, py::arg("length"), py::call_guard<py::gil_scoped_release>())
      .def("truncate", &LeaseHandle::truncate, py::arg("length"), py::call_guard<py::gil_scoped_release>())
      .def("release", &LeaseHandle::release, py::call_guard<py::gil_scoped_release>());

  py::class_<PromptCache, std::shared_ptr<PromptCache>>(m, "PromptCache")
      .def(py::init([](const std::string& acl_lib, int32_t device, size_t pool_bytes, size_t watermark_bytes,
                       const std::vector<size_t>& plane_block_bytes, int32_t block_size, bool whole_blocks,
                       std::optional<size_t> max_pinned_bytes, bool lfu, bool second_sighting,
                       int priority_bits, bool fenced) {
             py::gil_scoped_release release;
             npc::device::PoolOptions options;
             options.acl_lib = acl_lib;
             options.device = device;
             options.pool_bytes = pool_bytes;
             options.watermark_bytes = watermark_bytes;
             options.plane_block_bytes = plane_block_bytes;
             options.block_size = block_size;
             options.whole_blocks = whole_blocks;
             options.max_pinned_bytes = max_pinned_bytes.value_or(pool_bytes);
             options.policy = lfu ? npc::EvictionPolicy::kLfu : npc::EvictionPolicy::kLru;
             options.second_sighting = second_sighting;
             options.priority_bits = priority_bits;
             options.fenced = fenced;
             return std::make_shared<PromptCache>(options);
           }),
           py::kw_only(), py::arg("acl_lib"), py::arg("device"), py::arg("pool_bytes"),
           py::arg("watermark_bytes"), py::arg("plane_block_bytes"), py::arg("block_size"),
           py::arg("whole_blocks") = false, py::arg("max_pinned_bytes") = py::none(), py::arg("lfu") = false,
           py::arg("second_sighting") = false, py::arg("priority_bits") = 32, py::arg("fenced") = true)
      .def(
          "lookup",
          [](PromptCache& cache, const py::bytes& name_space, const py::object& ids) {
            std::string_view root = name_space;
            std::vector<Token> tokens = tokens_of(ids);
            npc::LookedUp found;
            {
              py::gil_scoped_release release;
              found = cache.lookup(root, tokens.data(), static_cast<int64_t>(tokens.size()));
            }
            return py::make_tuple(found.cached_tokens, array_of(found.blocks));
          },
          py::arg("namespace"), py::arg("token_ids"))
      .def(
          "acquire",
          [](PromptCache& cache, const py::bytes& name_space, const py::object& ids,
             std::optional<int64_t> limit, uintptr_t stream, int64_t priority) {
            const npc::EntryOptions options = options_of(priority);
            std::string_view root = name_space;
            std::vector<Token> tokens = tokens_of(ids);
            auto count = static_cast<int64_t>(tokens.size());
            int64_t most = checked_limit(limit.value_or(count - 1), count);
            py::gil_scoped_release release;
            return cache.acquire(root, tokens.data(), count, most, stream_of(stream), options);
          },
          py::arg("namespace"), py::arg("token_ids"), py::arg("limit") = py::none(), py::arg("stream") = 0,
          py::arg("priority") = npc::kDefaultPriority)
      .def("acquire_batch", &acquire_batch, py::arg("namespace"), py::arg("prompts"), py::arg("limits"),
           py::arg("stream") = 0, py::arg("priority") = npc::kDefaultPriority)
      .def(
          "pin",
          [](PromptCache& cache, const py::bytes& name_space, const py::object& ids) {
            std::string_view root = name_space;
            std::vector<Token> tokens = tokens_of(ids);
            py::gil_scoped_release release;
            return cache.pin(root, tokens.data(), static_cast<int64_t>(tokens.size()));
          },
          py::arg("namespace"), py::arg("token_ids"))
      .def(
          "insert",
          [](PromptCache& cache, const py::bytes& name_space, const py::object& ids,
             const std::vector<uintptr_t>& planes, int kind, uintptr_t stream, int64_t priority) {
            const npc::EntryOptions options = options_of(priority);
            std::string_view root = name_space;
            std::vector<Token> tokens = tokens_of(ids);
            std::vector<npc::device::Source> sources;
            for (uintptr_t plane : planes)
              sources.push_back(
                  {reinterpret_cast<const void*>(plane), static_cast<npc::acl::MemcpyKind>(kind)});
            py::gil_scoped_release release;
            return cache.insert(root, tokens.data(), static_cast<int64_t>(tokens.size()), sources,
                                stream_of(stream), options);
          },
          py::arg("namespace"), py::arg("token_ids"), py::arg("planes"), py::arg("kind"),
          py::arg("stream") = 0, py::arg("priority") = npc::kDefaultPriority)
      .def("plane_capsule", &plane_capsule, py::arg("plane"), py::arg("shape"), py::arg("code"),
           py::arg("bits"), py::arg("device_type"), py::arg("device_id"))
      .def("plane_address",
           [](const PromptCache& cache, size_t plane) {
             return reinterpret_cast<uintptr_t>(without_gil([&] { return cache.region(); })->plane(plane));
           })
      .def_property_readonly(
          "block_count",
          [](const PromptCache& cache) { return without_gil([&] { return cache.region(); })->block_count(); })
      .def_property_readonly("block_bytes", &PromptCache::block_bytes)
      .def_property_readonly("closed", &PromptCache::closed)
      .def_property_readonly("runtime_path", [](const PromptCache& cache) { return cache.runtime().path(); })
      .def_property_readonly("runtime_how", [](const PromptCache& cache) { return cache.runtime().how(); })
      .def("stats", &stats_of)
      .def("eviction_order", &PromptCache::eviction_order,
           "Unpinned entries, the next to be evicted first, each as the tokens from the root to its last.")
      .def("clear", &PromptCache::clear, py::call_guard<py::gil_scoped_release>())
      .def("check_integrity", &PromptCache::check_integrity, py::call_guard<py::gil_scoped_release>())
      .def("close", &PromptCache::close, py::call_guard<py::gil_scoped_release>());
}
