// Random transitions of a block pool beside a plain model of it; run by test_block_pool.py. Exits with 0, or
// says what differs and exits with 1.
//
//   block_pool SEED
#include "cache/block_pool.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using npc::BlockId;
using npc::BlockPool;
using npc::BlockState;
using npc::Ticket;

namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

struct Model {
  BlockState state = BlockState::kFree;
  int32_t users = 0;
  Ticket last_use = 0;
};

class Walk {
 public:
  explicit Walk(uint32_t seed) : random_(seed), model_(kBlocks) { model_[0].state = BlockState::kPadding; }

  void step() {
    size_t kind = random_() % 16;
    if (kind < 6) {
      allocate(random_() % 40);
    } else if (kind == 6) {
      // Newer by a little or by a lot: every bit of a ticket is once the highest that differs.
      newest_ += 1 + (random_() % 4 == 0 ? random_() % 100'000'000'000 : random_() % 3);
    } else if (kind == 7) {
      pass();
    } else {
      change(static_cast<BlockId>(1 + random_() % (kBlocks - 1)), kind);
    }
    check();
  }

 private:
  static constexpr BlockId kBlocks = 600;

  void allocate(size_t count) {
    BlockId after = static_cast<BlockId>(random_() % kBlocks);
    std::vector<BlockId> out;
    bool had_room = pool_.count(BlockState::kFree) >= count;
    expect(pool_.allocate(count, after, out) == had_room, "allocate() misjudges the room there is");
    expect(out.size() == (had_room ? count : 0), "allocate() gives another number of blocks");
    for (BlockId block : out) {
      Model& at = model_[block];
      expect(at.state == BlockState::kFree, "allocate() gives a block that is not free");
      bool has_successor = after != 0 && after + 1 < kBlocks && model_[after + 1].state == BlockState::kFree;
      expect(!has_successor || block == after + 1, "allocate() passes a free successor over");
      at = {BlockState::kLeased, 1, 0};
      after = block;
    }
  }

  void change(BlockId block, size_t kind) {
    Model& at = model_[block];
    Ticket use = newest_ - std::min<Ticket>(newest_, random_() % 8);  // of any stream, in any order
    if (at.users > 0 && kind < 9) {
      pool_.share(block);
      ++at.users;
    } else if (at.users > 0 && kind < 13) {
      pool_.drop(block, use);
      at.last_use = std::max(at.last_use, use);
      if (--at.users == 0 && at.state == BlockState::kLeased) retire(at);
    } else if (at.state == BlockState::kLeased) {
      pool_.publish(block);
      at.state = BlockState::kCached;
    } else if (at.state == BlockState::kCached && at.users == 0) {
      pool_.retire(block, use);
      at.last_use = std::max(at.last_use, use);
      retire(at);
    }
  }

  void retire(Model& at) { at.state = at.last_use <= passed_ ? BlockState::kFree : BlockState::kFenced; }

  void pass() {
    Ticket ticket = random_() % 4 == 0 ? newest_ : passed_ + random_() % (newest_ - passed_ + 1);
    passed_ = std::max(passed_, ticket);
    pool_.pass(random_() % 8 == 0 ? random_() % (ticket + 1) : ticket);  // older ones change nothing
    pool_.pass(ticket);
    for (Model& at : model_) {
      if (at.state == BlockState::kFenced) retire(at);
    }
  }

  void check() {
    pool_.check_integrity();
    for (BlockId block = 0; block < kBlocks; ++block) {
      expect(pool_.state(block) == model_[block].state, "a block is in another state");
      expect(pool_.users(block) == model_[block].users, "a block has other users");
    }
  }

  std::mt19937_64 random_;
  BlockPool pool_{kBlocks};
  std::vector<Model> model_;
  Ticket newest_ = 0, passed_ = 0;
};

// More blocks than one call frees: each call frees as many as it says, and the last call the rest.
void pass_many() {
  constexpr size_t kMany = 3 * BlockPool::kDueBlocks + 5;
  BlockPool pool(kMany + 1);
  std::vector<BlockId> blocks;
  pool.allocate(kMany, 0, blocks);
  for (size_t i = kMany; i > 0; --i) pool.drop(blocks[i - 1], 1 + i % 7);
  for (size_t call = 0; pool.count(BlockState::kFenced) > 0; ++call) {
    expect(call < 8, "pass() does not come to an end");
    size_t free = pool.count(BlockState::kFree);
    pool.pass(7);
    expect(pool.count(BlockState::kFree) - free <= BlockPool::kDueBlocks,
           "pass() frees more than it may at once");
    pool.check_integrity();
  }
}

// What was given back from its last block to its first is handed out as neighbours again.
void give_neighbours() {
  BlockPool pool(100);
  std::vector<BlockId> first, second;
  pool.allocate(99, 0, first);
  for (size_t i = first.size(); i > 0; --i) pool.drop(first[i - 1], 1);
  pool.pass(1);
  pool.allocate(99, 0, second);
  expect(first == second, "a sequence of blocks is not handed out again as it was");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    Walk walk(static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10)));
    for (int step = 0; step < 20'000; ++step) walk.step();
    pass_many();
    give_neighbours();
  } catch (const npc::IntegrityError& error) {
    expect(false, error.what());
  }
}
