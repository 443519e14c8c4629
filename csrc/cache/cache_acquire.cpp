// How a lease comes to its blocks: acquire, pin, fork and truncate.
#include <algorithm>
#include <utility>

#include "cache/batch_prefixes.h"
#include "cache/cache.h"

namespace npc {

// What the rows of a batch will be given. Their leases have what they read pinned, and no blocks yet.
struct Cache::Plan {
  struct Row {
    std::unique_ptr<Lease> lease;
    size_t shared_blocks = 0;  // at the head of its table: of its path, or of row `shared_with`
    size_t shared_with = kNone;
    int64_t start = 0;      // tokens that it need not compute
    int64_t first_new = 0;  // number of token `start` among the new tokens of the batch
  };
  static constexpr size_t kNone = ~size_t{0};

  // Number, among the new tokens of the batch, of the one that becomes token `at` of a row. It must not be
  // cached.
  int64_t new_token(size_t row, int64_t at) const {
    while (at < rows[row].start) row = rows[row].shared_with;
    return rows[row].first_new + at - rows[row].start;
  }

  Root* root = nullptr;
  EntryOptions options;
  std::vector<Row> rows;
  size_t own_blocks = 0;  // to be allocated
  size_t copies = 0;      // new tokens to be written twice
  size_t parts = 0;       // rows that take a part of an entry's block, to be copied
};

void Cache::pin_all(const Lease* lease) {
  tree_.pin(lease->root);
  for (Entry* entry : lease->path) tree_.pin(entry);
  for (const Lease::Held& held : lease->held) tree_.pin(held.entry);
  if (lease->tail != nullptr) tree_.pin(lease->tail);
}

// Counts the request as a user of what was found for it.
void Cache::use_path(const Lease* lease) {
  const Entry* last = !lease->held.empty()   ? lease->held.back().entry
                      : !lease->path.empty() ? lease->path.back()
                                             : nullptr;
  if (last != nullptr) tree_.prioritize(last, lease->options.priority);
  if (!tree_.counts_uses()) return;
  for (const Entry* entry : lease->path) tree_.use(entry);
  for (const Lease::Held& held : lease->held) tree_.use(held.entry);
}

// Unpins the entries of the path from block `path_from` on, and those off the path from block `off_path_from`
// on.
void Cache::unpin_from(Lease* lease, size_t path_from, size_t off_path_from, Ticket last_use) {
  auto unpin = [&](Entry* entry) {
    entry->last_use = std::max(entry->last_use, last_use);
    tree_.unpin(entry);
  };
  if (lease->tail != nullptr && lease->path.size() >= off_path_from) {
    lease->held.push_back({std::exchange(lease->tail, nullptr), lease->path.size()});
  }
  auto kept = std::partition(lease->held.begin(), lease->held.end(),
                             [&](const Lease::Held& held) { return held.index < off_path_from; });
  for (auto held = kept; held != lease->held.end(); ++held) {
    unpin(held->entry);
    drop_if_covered(held->entry);
  }
  lease->held.erase(kept, lease->held.end());
  for (; lease->path.size() > path_from; lease->path.pop_back()) unpin(lease->path.back());
}

// Adds the next row's lease, with its pins: it takes what is cached, or what it shares with an earlier row.
void Cache::plan_row(Plan& plan, const Prompt& prompt, size_t shared_with, int64_t shared_tokens,
                     bool with_parts) {
  const int64_t block_size = options_.block_size;
  Plan::Row row;
  row.lease.reset(new Lease);
  Lease* lease = row.lease.get();
  lease->root = plan.root;
  lease->options = plan.options;
  lease->length = prompt.count;
  PathMatch match = this->match(plan.root, prompt.tokens, prompt.limit);
  if (!with_parts) match.drop_tail();
  if (shared_tokens > match.tokens) {
    const Lease& other = *plan.rows[shared_with].lease;
    row.shared_with = shared_with;
    row.shared_blocks = static_cast<size_t>(shared_tokens / block_size);
    row.start = shared_tokens;
    auto path_blocks = static_cast<int64_t>(std::min(row.shared_blocks, other.path.size()));
    lease->path.assign(other.path.begin(), other.path.begin() + path_blocks);
    lease->cached = std::min(other.cached, shared_tokens);
    int64_t own_start = static_cast<int64_t>(row.shared_blocks) * block_size;
    plan.copies += static_cast<size_t>(shared_tokens - std::max(own_start, lease->cached));
  } else {
    row.start = lease->cached = match.tokens;
    lease->path = std::move(match.path);
    row.shared_blocks = lease->path.size();
    if (match.tail.entry != nullptr) lease->held.push_back({match.tail.entry, lease->path.size()});
    plan.parts += match.tail.entry != nullptr;
  }
  lease->known.assign(prompt.tokens + lease->path.size() * block_size, prompt.tokens + prompt.count);
  lease->blocks.reserve(blocks_for(prompt.count));
  plan.own_blocks += blocks_for(prompt.count) - row.shared_blocks;
  plan.rows.push_back(std::move(row));
  pin_all(lease);
}

void Cache::plan_rows(Plan& plan, const std::vector<Prompt>& prompts, bool with_parts) {
  BatchPrefixes prefixes;
  plan.rows.reserve(prompts.size());
  for (const Prompt& prompt : prompts) {
    BatchPrefixes::Shared shared;
    // Whole blocks are computed one by one, in forwards that other rows have no part in.
    if (prompts.size() > 1 && !options_.whole_blocks) shared = prefixes.add(prompt.tokens, prompt.count);
    plan_row(plan, prompt, shared.row, std::min(shared.tokens, prompt.limit), with_parts);
  }
}

void Cache::cancel(Plan& plan) {
  for (auto row = plan.rows.rbegin(); row != plan.rows.rend(); ++row) {
    unpin_from(row->lease.get(), 0, 0, 0);
    tree_.unpin(plan.root);
  }
  plan.rows.clear();
  plan.own_blocks = plan.copies = plan.parts = 0;
}

AcquiredBatch Cache::acquire(std::string_view name_space, const std::vector<Prompt>& prompts, Ticket newest,
                             StreamId stream, bool counted, const EntryOptions& options) {
  std::lock_guard lock(mutex_);
  check_open();
  Plan plan;
  plan.options = options;
  plan.root = tree_.get_root(name_space);
  AcquiredBatch batch;
  try {
    plan_rows(plan, prompts, true);
    const size_t possible = room_possible();
    if (possible < plan.own_blocks && possible + plan.parts >= plan.own_blocks) {
      // A part to copy from may be the very entry that must go: rather compute those tokens again than fail.
      cancel(plan);
      plan_rows(plan, prompts, false);
    }
    batch.rows.reserve(prompts.size());
    batch.copy_sources.reserve(plan.copies);
    batch.copy_slots.reserve(plan.copies);
    leases_.reserve(leases_.size() + prompts.size());
    if (!make_room(plan.own_blocks, prompts.size() == 1 ? "a request" : "a batch")) batch.wait_for = newest;
  } catch (...) {
    cancel(plan);
    tree_.drop_root_if_unused(plan.root);
    throw;
  }
  if (batch.wait_for != 0) {
    cancel(plan);
    tree_.drop_root_if_unused(plan.root);
    return batch;
  }
  int64_t first_new = 0;
  for (size_t row = 0; row < prompts.size(); ++row) {
    plan.rows[row].first_new = first_new;
    first_new += prompts[row].count - plan.rows[row].start;
    give_blocks(plan, row, stream, batch);
  }
  for (size_t row = 0; row < prompts.size(); ++row) {
    Lease* lease = plan.rows[row].lease.release();
    leases_.insert(lease);
    use_path(lease);
    if (!counted) continue;
    count_lookup(lease->length, lease->cached);
    counters_.computed_tokens += static_cast<uint64_t>(lease->length - batch.rows[row].start);
  }
  return batch;
}

// There is room, and nothing here throws.
void Cache::give_blocks(Plan& plan, size_t number, StreamId stream, AcquiredBatch& batch) {
  const Plan::Row& row = plan.rows[number];
  Lease* lease = row.lease.get();
  const int64_t own_start = static_cast<int64_t>(row.shared_blocks) * options_.block_size;
  const Lease* other = row.shared_with == Plan::kNone ? nullptr : plan.rows[row.shared_with].lease.get();
  if (other == nullptr) {
    for (const Entry* entry : lease->path) lease->blocks.push_back(entry->block);
    lease->borrowed = lease->path.size();
  } else {
    share_blocks(other, row.shared_blocks, lease);
  }
  pool_.allocate(blocks_for(lease->length) - row.shared_blocks,
                 lease->blocks.empty() ? 0 : lease->blocks.back(), lease->blocks);
  BlockId own = lease->blocks[row.shared_blocks];

  Acquired acquired{lease, lease->cached, row.start, std::nullopt};
  if (lease->cached > own_start) {
    BlockId from = other == nullptr ? lease->held.back().entry->block : other->blocks[row.shared_blocks];
    acquired.copy = RowCopy{from, own, static_cast<int32_t>(lease->cached - own_start)};
  }
  for (int64_t at = std::max(own_start, lease->cached); at < row.start; ++at) {
    batch.copy_sources.push_back(plan.new_token(row.shared_with, at));
    batch.copy_slots.push_back(static_cast<int64_t>(own) * options_.block_size + at - own_start);
  }
  auto read = [&](const Entry* entry) {
    if (entry->writer != stream) batch.written = std::max(batch.written, entry->written);
  };
  std::for_each(lease->path.begin(), lease->path.end(), read);
  for (const Lease::Held& held : lease->held) read(held.entry);
  batch.rows.push_back(acquired);
}

// Appends the first `count` blocks of one table to the empty one of another lease.
void Cache::share_blocks(const Lease* from, size_t count, Lease* to) {
  to->blocks.insert(to->blocks.end(), from->blocks.begin(),
                    from->blocks.begin() + static_cast<int64_t>(count));
  to->borrowed = std::min(from->borrowed, count);
  for (size_t i = to->borrowed; i < count; ++i) pool_.share(to->blocks[i]);
}

Acquired Cache::pin(std::string_view name_space, const Token* tokens, int64_t count) {
  std::lock_guard lock(mutex_);
  check_open();
  Plan plan;
  plan.root = tree_.get_root(name_space);
  auto lease = std::unique_ptr<Lease>(new Lease);
  lease->root = plan.root;
  try {
    PathMatch match = this->match(lease->root, tokens, count);
    lease->path = std::move(match.path);
    if (match.tail.entry != nullptr) lease->held.push_back({match.tail.entry, lease->path.size()});
    lease->cached = match.tokens;
    const size_t anew = pinned_anew(lease.get());
    if (blocks_of_pins_ + anew > options_.pinned_blocks) throw PinLimitExceeded(pin_limit_message(anew));
    leases_.insert(lease.get());
  } catch (...) {
    tree_.drop_root_if_unused(plan.root);
    throw;
  }
  pin_all(lease.get());
  lease->is_pin = true;
  count_pin(lease.get(), 1);
  const int64_t cached = lease->cached;
  return {lease.release(), cached, cached, std::nullopt};
}

// Blocks of the path that no pin holds yet.
size_t Cache::pinned_anew(const Lease* pin) const {
  auto is_new = [&](const Entry* entry) { return pins_of_[entry->block] == 0; };
  auto anew = static_cast<size_t>(std::count_if(pin->path.begin(), pin->path.end(), is_new));
  for (const Lease::Held& held : pin->held) anew += is_new(held.entry);
  return anew;
}

void Cache::count_pin(const Lease* pin, int32_t change) {
  auto count = [&](const Entry* entry) {
    blocks_of_pins_ -= pins_of_[entry->block] > 0;
    blocks_of_pins_ += (pins_of_[entry->block] += change) > 0;
  };
  std::for_each(pin->path.begin(), pin->path.end(), count);
  for (const Lease::Held& held : pin->held) count(held.entry);
}

std::string Cache::pin_limit_message(size_t anew) const {
  auto bytes = [&](size_t blocks) { return std::to_string(blocks * options_.block_bytes) + " bytes"; };
  return "a pin of " + bytes(anew) + " more: pins hold " + bytes(blocks_of_pins_) + " of at most " +
         bytes(options_.pinned_blocks) + ". Release pins, or make max_pinned_bytes larger";
}

// What is known of tokens [first, length), where the path, as far as it stays, ends at `first`.
std::vector<Token> Cache::known_until(const Lease* lease, int64_t length) const {
  const auto keep = static_cast<size_t>(length / options_.block_size);
  const int64_t rows = length % options_.block_size;
  if (keep < lease->path.size()) {
    const Token* tokens = tree_.tokens(lease->path[keep]);
    return std::vector<Token>(tokens, tokens + rows);
  }
  const Token* tokens = lease->known.data();
  auto count = static_cast<int64_t>(lease->known.size());
  if (lease->tail != nullptr && lease->tail->token_count > count) {  // one that shares the block published it
    tokens = tree_.tokens(lease->tail);
    count = lease->tail->token_count;
  }
  count = std::min(count, length - static_cast<int64_t>(lease->path.size()) * options_.block_size);
  return std::vector<Token>(tokens, tokens + count);
}

AcquiredBatch Cache::fork(const Lease* parent, int64_t length, Ticket newest) {
  std::lock_guard lock(mutex_);
  check_open();
  check_inside(parent, length, "fork");
  const auto whole = static_cast<size_t>(length / options_.block_size);
  const auto rows = static_cast<int32_t>(length % options_.block_size);
  auto lease = std::unique_ptr<Lease>(new Lease);
  AcquiredBatch batch;
  batch.rows.reserve(1);
  lease->blocks.reserve(blocks_for(length));
  lease->known = known_until(parent, length);
  auto path_blocks = static_cast<int64_t>(std::min(whole, parent->path.size()));
  lease->path.assign(parent->path.begin(), parent->path.begin() + path_blocks);
  lease->held.reserve(parent->held.size() + 1);
  for (const Lease::Held& held : parent->held) {
    if (held.index < whole) lease->held.push_back(held);
  }
  if (parent->tail != nullptr && parent->path.size() < whole) lease->tail = parent->tail;
  Lease::Admission admission = parent->admission;  // before anything changes: it may throw
  admission.cut(whole, length);
  if (!make_room(rows == 0 ? 0 : 1, "a fork")) {
    batch.wait_for = newest;
    return batch;
  }
  leases_.insert(lease.get());

  lease->root = parent->root;
  lease->options = parent->options;
  lease->is_fork = true;
  lease->admission = std::move(admission);
  pin_all(lease.get());
  share_blocks(parent, whole, lease.get());
  lease->length = length;
  lease->cached = std::min(parent->cached, length);
  lease->committed = std::min(parent->committed, length);
  batch.rows.push_back({lease.get(), lease->cached, length, std::nullopt});
  if (rows > 0) {
    pool_.allocate(1, lease->blocks.empty() ? 0 : lease->blocks.back(), lease->blocks);
    batch.rows[0].copy = RowCopy{parent->blocks[whole], lease->blocks[whole], rows};
  }
  lease.release();
  return batch;
}

// True where nobody else reads what comes after row `length` in the block where that is.
bool Cache::is_writable(const Lease* lease, int64_t length) const {
  const auto index = static_cast<size_t>(length / options_.block_size);
  const int64_t rows = length % options_.block_size;
  if (rows == 0) return true;
  if (pool_.users(lease->blocks[index]) > 1) return false;
  return pool_.state(lease->blocks[index]) == BlockState::kLeased ||
         (lease->tail != nullptr && lease->path.size() == index && lease->tail->token_count <= rows);
}

std::optional<Ticket> Cache::prepare_truncate(Lease* lease, int64_t length, Ticket newest,
                                              std::optional<RowCopy>& copy) {
  std::lock_guard lock(mutex_);
  check_open();
  check_inside(lease, length, "truncate");
  if (is_writable(lease, length)) return std::nullopt;
  if (!make_room(1, "truncating a request")) return newest;
  const auto index = static_cast<size_t>(length / options_.block_size);
  std::vector<BlockId> own;
  pool_.allocate(1, index == 0 ? 0 : lease->blocks[index - 1], own);
  lease->spare = own[0];
  copy = RowCopy{lease->blocks[index], lease->spare, static_cast<int32_t>(length % options_.block_size)};
  return std::nullopt;
}

void Cache::cancel_truncate(Lease* lease, Ticket last_use) {
  std::lock_guard lock(mutex_);
  if (lease->spare != 0) pool_.drop(std::exchange(lease->spare, 0), last_use);
}

void Cache::truncate(Lease* lease, int64_t length, Ticket last_use) {
  std::lock_guard lock(mutex_);
  const auto whole = static_cast<size_t>(length / options_.block_size);
  const size_t kept_blocks = lease->spare != 0 ? whole : blocks_for(length);
  std::vector<Token> known = known_until(lease, length);
  drop_from(lease, kept_blocks, last_use);
  lease->blocks.resize(kept_blocks);
  if (lease->spare != 0) lease->blocks.push_back(std::exchange(lease->spare, 0));
  lease->borrowed = std::min(lease->borrowed, whole);
  unpin_from(lease, whole, kept_blocks, last_use);
  lease->known = std::move(known);
  lease->admission.cut(whole, length);
  lease->cached = std::min(lease->cached, length);
  lease->committed = std::min(lease->committed, length);
  lease->length = length;
  enforce_watermark();
}

void Cache::check_inside(const Lease* lease, int64_t length, const char* what) {
  if (length < 0 || length > lease->length)
    throw std::invalid_argument(std::string(what) + "(" + std::to_string(length) +
                                "): the lease has tokens [0, " + std::to_string(lease->length) + ")");
}

}  // namespace npc
