#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/device_step.h"
#include "core/ticket.h"
#include "ops/attend.h"
#include "ops/attention_checks.h"
#include "ops/stores.h"

// A decoding step's way through the drives in one call: submit, attend to what is in memory,
// complete, attend, merge. Attention runs where q is.
namespace swarm_kv::ops {
namespace {

constexpr const char* kOp = "fetch_attend";

// Which entries a row's queries see beside those that are fetched, and which of the fetched ones.
struct RowView {
  int64_t queries;
  int64_t own;          // the first one of its own
  int64_t own_count;    // the last ones are the queries' own tokens
  const bool* visible;  // per stored entry, or null for all
};

// The queries' lists of entries, in elements of the memory that they lie in.
class Lists {
 public:
  Lists(std::vector<RowView> rows, int64_t item) : rows_(std::move(rows)), item_(item) {}

  // Of the entries that a delivery brought to `slots`, one for each, with the rows' own entries
  // behind them, unless `own`, where these lie, is empty: query i of n sees all but the last
  // n - 1 - i of them. Slots are byte offsets; what lies at -1 is left out.
  SlotLists of(const Delivery& delivery, std::span<const int64_t> slots,
               std::span<const int64_t> own) {
    slots_.clear();
    offsets_.assign(1, 0);
    for (size_t r = 0; r < rows_.size(); ++r) {
      const RowView& row = rows_[r];
      const size_t first = slots_.size();
      for (int64_t i = delivery.rows[r]; i < delivery.rows[r + 1]; ++i) {
        if (row.visible == nullptr || row.visible[delivery.ids[i]]) add(slots[i]);
      }
      const size_t fetched = slots_.size() - first;
      for (int64_t query = 0; query < row.queries; ++query) {
        if (query > 0) {
          slots_.resize(slots_.size() + fetched);
          std::copy_n(slots_.begin() + first, fetched, slots_.end() - fetched);
        }
        if (!own.empty()) {
          const int64_t later = row.queries - 1 - query;
          for (const int64_t slot : own.subspan(row.own, row.own_count - later)) add(slot);
        }
        offsets_.push_back(static_cast<int64_t>(slots_.size()));
      }
    }
    return {slots_, offsets_};
  }

 private:
  void add(int64_t slot) {
    if (slot >= 0) slots_.push_back(slot / item_);
  }

  // Kept by each thread, so that a step as large as the last one asks for no memory.
  struct Scratch {
    std::vector<int64_t> slots;
    std::vector<int64_t> offsets;
  };
  static Scratch& own_scratch() {
    static thread_local Scratch scratch;
    return scratch;
  }

  std::vector<RowView> rows_;
  int64_t item_;
  std::vector<int64_t>& slots_ = own_scratch().slots;
  std::vector<int64_t>& offsets_ = own_scratch().offsets;
};

// Per row the numbers of all entries that deliveries brought.
class Fetched {
 public:
  explicit Fetched(size_t rows) : rows_(rows) {
    if (ids_.size() < rows) ids_.resize(rows);
    for (auto& ids : ids_) ids.clear();
  }

  void add(const Delivery& delivery) {
    for (size_t r = 0; r < rows_; ++r) {
      ids_[r].insert(ids_[r].end(), delivery.ids.begin() + delivery.rows[r],
                     delivery.ids.begin() + delivery.rows[r + 1]);
    }
  }
  // Those of the part.
  void add(const DevicePart& part) {
    for (size_t r = 0; r < rows_; ++r) {
      for (int64_t i = part.delivery.rows[r]; i < part.delivery.rows[r + 1]; ++i) {
        if (part.slots[i] >= 0) ids_[r].push_back(part.delivery.ids[i]);
      }
    }
  }

  std::pair<Tensor, Tensor> tensors() const {
    std::vector<int64_t> bounds{0};
    for (size_t r = 0; r < rows_; ++r) {
      bounds.push_back(bounds.back() + static_cast<int64_t>(ids_[r].size()));
    }
    const Tensor flat = empty_cpu({bounds.back()}, ScalarType::Long);
    for (size_t r = 0; r < rows_; ++r) {
      std::ranges::copy(ids_[r], mutable_data<int64_t>(flat) + bounds[r]);
    }
    return {flat, int64_tensor(bounds)};
  }

 private:
  // Kept by each thread, one call at a time.
  static std::vector<std::vector<int64_t>>& own_scratch() {
    static thread_local std::vector<std::vector<int64_t>> scratch;
    return scratch;
  }

  size_t rows_;
  std::vector<std::vector<int64_t>>& ids_ = own_scratch();
};

// Slots must lie in the pool of `bytes` bytes, at whole numbers of items.
void check_own(std::span<const int64_t> own, int64_t bytes, int64_t item, int64_t entry_bytes) {
  if (own.empty()) return;
  const auto [low, high] = std::ranges::minmax(own);
  const bool whole = std::ranges::all_of(own, [item](int64_t slot) { return slot % item == 0; });
  check(low >= 0 && high <= bytes - entry_bytes && whole, kOp, ": own must hold multiples of ",
        item, " within [0, ", bytes - entry_bytes, "], the pool's byte offsets; got values from ",
        low, " to ", high);
}

std::vector<RowView> row_views(const std::vector<int64_t>& limits,
                               const std::vector<int64_t>& queries, int64_t all_queries,
                               int64_t own, const std::vector<int64_t>& own_rows,
                               const bool* visible) {
  const size_t count = limits.size();
  check(queries.size() == count && own_rows.size() == count + 1, kOp, ": `queries` holds ",
        queries.size(), " numbers and `own_rows` ", own_rows.size(), ", but `limits` names ", count,
        " rows: one of each per row, and one offset more, are needed");
  check(own_rows.front() == 0 && own_rows.back() == own && std::ranges::is_sorted(own_rows), kOp,
        ": `own_rows` must ascend from 0 to the length of `own`, ", own);
  std::vector<RowView> rows;
  int64_t total = 0;
  for (size_t r = 0; r < count; ++r) {
    const int64_t count_own = own_rows[r + 1] - own_rows[r];
    check(queries[r] >= 1 && queries[r] <= count_own, kOp, ": row ", r, " has ", queries[r],
          " queries and ", count_own, " entries of its own, among which each query's must be");
    total += queries[r];
    rows.push_back({queries[r], own_rows[r], count_own, visible});
    if (visible != nullptr) visible += limits[r];
  }
  check(total == all_queries, kOp, ": `queries` must sum up to the rows of q, ", all_queries,
        ", got ", total);
  return rows;
}

// The operator `name`, where its tensors lie. Both return an output and its log-sum-exp.
template <typename... Arguments>
std::tuple<Tensor, Tensor> call(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

// What a step asks, with checked arguments.
struct Asked {
  std::span<const Row> rows;
  int64_t ahead;
  Tensor q;
  std::span<const int64_t> own;
  int64_t kv_heads;
  double scale;
  std::optional<Tensor> sinks;
  std::optional<double> softcap;
};

struct Answer {
  Tensor out;
  Tensor lse;
  Fetched fetched;
  FetchSeconds seconds;
};

Answer attend_on_host(Store& store, const Asked& asked, Lists& lists) {
  const std::shared_ptr<Region> region = store.region();
  const Tensor& q = asked.q;
  const ScalarType acc = accumulation_dtype(q.scalar_type());
  const Tensor q_c = as_contiguous(q, acc);
  const Tensor sinks_c = asked.sinks ? as_contiguous(*asked.sinks, acc) : q_c;
  const double softcap = asked.softcap.value_or(0);
  const AttendOptions options{asked.kv_heads, asked.scale, asked.sinks ? &sinks_c : nullptr,
                              softcap};
  const AttendOptions further{asked.kv_heads, asked.scale, nullptr, softcap};
  Answer answer{empty_cpu({q.size(0), q.size(1), q.size(2)}, acc),
                empty_cpu({q.size(0), q.size(1)}, acc),
                Fetched(asked.rows.size()),
                {}};
  Tensor piece_out, piece_lse;

  const auto began = std::chrono::steady_clock::now();
  static thread_local Delivery part;  // keeps its memory
  const Ticket ticket(store, store.submit(asked.rows, Purpose::kDecode, asked.ahead, part));
  answer.seconds.submitting = FetchSeconds::since(began);
  answer.fetched.add(part);
  // What is in memory is attended to while the reads are under way.
  attend(q_c, q.scalar_type(), region->data(), lists.of(part, part.slots, asked.own), options,
         answer.out, answer.lse);
  for (bool more = true; more;) {
    const auto asked_at = std::chrono::steady_clock::now();
    more = ticket.wait(part);
    answer.seconds.waiting += FetchSeconds::since(asked_at);
    if (part.ids.empty()) continue;
    answer.fetched.add(part);
    if (!piece_out.defined()) {
      piece_out = torch::stable::empty_like(answer.out);
      piece_lse = torch::stable::empty_like(answer.lse);
    }
    attend(q_c, q.scalar_type(), region->data(), lists.of(part, part.slots, {}), further, piece_out,
           piece_lse);
    merge_into(answer.out, answer.lse, piece_out, piece_lse);
  }
  return answer;
}

// A list on the device of `like`, behind what was enqueued there. Through pinned memory, which
// torch takes back when the copy is done: nobody waits for it.
Tensor list_on_device(std::span<const int64_t> values, const Tensor& like) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const Tensor list = torch::stable::empty({static_cast<int64_t>(values.size())}, ScalarType::Long,
                                           std::nullopt, cpu, like.is_cuda());
  std::ranges::copy(values, mutable_data<int64_t>(list));
  return torch::stable::to(list, like.device(), /*non_blocking=*/true);
}

Answer attend_on_device(Store& store, const Asked& asked, Lists& lists) {
  const DeviceTier& tier = *store.device();
  const Tensor q_c = as_contiguous(asked.q);
  const Tensor pool = torch::stable::from_blob(
      tier.memory(), {tier.size() / static_cast<int64_t>(q_c.element_size())}, {1}, q_c.device(),
      q_c.scalar_type());
  Answer answer{{}, {}, Fetched(asked.rows.size()), {}};
  step_on_device(
      store, asked.rows, asked.own, asked.ahead,
      [&](const DevicePart& part) {
        answer.fetched.add(part);
        const bool first = !answer.out.defined();
        const SlotLists of_part = lists.of(part.delivery, part.slots, part.own);
        const auto [out, lse] =
            call("swarm_kv::sparse_attention", q_c, pool, list_on_device(of_part.slots, q_c),
                 list_on_device(of_part.offsets, q_c), asked.kv_heads, asked.scale,
                 first ? asked.sinks : std::nullopt, asked.softcap);
        std::tie(answer.out, answer.lse) =
            first ? std::tuple(out, lse)
                  : call("swarm_kv::merge_attention", answer.out, answer.lse, out, lse);
      },
      answer.seconds);
  return answer;
}

// Whether the store attends where q is, which is not the host.
bool on_device_of(Store& store, const Tensor& q) {
  const DeviceTier* tier = store.device();
  const int ordinal = q.is_cuda() ? q.get_device_index() : Device::kHost;
  if (tier != nullptr && tier->ordinal() == ordinal) return true;
  check(!q.is_cuda(), kOp, ": the store does not attend on the device of q ", describe(q),
        "; attach it there (store_attach), or move q with .cpu()");
  return false;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, double, double> fetch_attend(
    int64_t handle, std::vector<int64_t> segments, std::vector<int64_t> segment_rows,
    Tensor clusters, Tensor cluster_rows, Tensor entries, Tensor entry_rows,
    std::vector<int64_t> limits, int64_t ahead, Tensor q, std::vector<int64_t> queries, Tensor own,
    std::vector<int64_t> own_rows, int64_t kv_heads, double scale, std::optional<Tensor> sinks,
    std::optional<double> softcap, std::optional<Tensor> visible) {
  const std::shared_ptr<Store> store = store_of(handle);
  Argument{kOp, "q", q}.floating().dim(3);
  check_heads(kOp, q, kv_heads, sinks, softcap);
  const WantedRows wanted(kOp, std::move(segments), segment_rows, clusters, cluster_rows, entries,
                          entry_rows, limits);
  const Tensor own_c = list_of(kOp, "own", own, ScalarType::Long);
  const std::span<const int64_t> own_slots{data<int64_t>(own_c),
                                           static_cast<size_t>(own_c.numel())};
  const auto item = static_cast<int64_t>(q.element_size());
  check_own(own_slots, static_cast<int64_t>(store->region()->size()), item,
            2 * kv_heads * q.size(2) * item);
  Tensor shown;
  if (visible) {
    shown = list_of(kOp, "visible", *visible, ScalarType::Bool);
    Argument{kOp, "visible", shown}.size(
        0, std::accumulate(limits.begin(), limits.end(), int64_t{0}), "entries below `limits`");
  }
  Lists lists(row_views(limits, queries, q.size(0), own_c.numel(), own_rows,
                        visible ? data<bool>(shown) : nullptr),
              item);
  const Asked asked{wanted.rows(), ahead, q, own_slots, kv_heads, scale, sinks, softcap};
  const Answer answer = on_device_of(*store, q) ? attend_on_device(*store, asked, lists)
                                                : attend_on_host(*store, asked, lists);
  const auto [ids, rows] = answer.fetched.tensors();
  return {answer.out, answer.lse, ids, rows, answer.seconds.submitting, answer.seconds.waiting};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(swarm_kv, m) {
  m.def(
      "fetch_attend(int store, int[] segments, int[] segment_rows, Tensor clusters, "
      "Tensor cluster_rows, Tensor entries, Tensor entry_rows, int[] limits, int ahead, Tensor q, "
      "int[] queries, Tensor own, int[] own_rows, int kv_heads, float scale, Tensor? sinks=None, "
      "float? softcap=None, Tensor? visible=None) -> (Tensor out, Tensor lse, Tensor ids, "
      "Tensor rows, float submitting, float waiting)");
}

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("fetch_attend", SWARM_KV_BOX(swarm_kv::ops::fetch_attend));
}

// What it calls there are operators itself.
STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CUDA, m) {
  m.impl("fetch_attend", SWARM_KV_BOX(swarm_kv::ops::fetch_attend));
}
