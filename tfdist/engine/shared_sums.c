/* TensorFlow's operation TfdistSum: sums tensors over processes of one machine, in memory that they share.

   The tensors of a process are one vector, cut into a chunk for each rank, and each chunk into blocks. Each process has
   an area of memory that the others can read, with room for a few blocks of each chunk, so that it stays in the cache.
   Of each block, a process gives its terms there to the ranks that add them up; adds up one chunk's, in the order of a
   ring; writes that sum to its area, too; and takes the other sums. Two counters in each area tell the others how many
   blocks it has given and added up.

   No process writes what another may still read. It gives a block when it has taken the third last one, of which all
   have then added up its terms; and it adds up a block when all have given it, and so have taken the third last one.

   See shared_sums.py for what surrounds this. It is the only caller of the functions below. */

#define _GNU_SOURCE
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Tells what the library was built from; see machine_code.py, which looks for it in the file. */
__attribute__((used)) static const char source[] = TFDIST_SOURCE;

/* TensorFlow's C API, as far as it is used, so that one binary serves all versions, and needs none to be built:
   tensorflow/c/{c_api,kernels,ops,tf_datatype,tf_status,tf_tensor}.h. */
typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
enum { TF_DOUBLE = 2, TF_OK = 0, TF_UNKNOWN = 2 };
TF_Status* TF_NewStatus(void);
void TF_DeleteStatus(TF_Status*);
void TF_SetStatus(TF_Status*, int code, const char* message);
int TF_GetCode(const TF_Status*);
void* TF_TensorData(const TF_Tensor*);
size_t TF_TensorByteSize(const TF_Tensor*);
int TF_TensorType(const TF_Tensor*);
int TF_NumDims(const TF_Tensor*);
int64_t TF_Dim(const TF_Tensor*, int);
void TF_DeleteTensor(TF_Tensor*);
TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* name);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderSetIsStateful(TF_OpDefinitionBuilder*, bool);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder*,
                                                     void (*)(TF_ShapeInferenceContext*, TF_Status*));
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder*, TF_Status*);
TF_ShapeHandle* TF_NewShapeHandle(void);
void TF_DeleteShapeHandle(TF_ShapeHandle*);
int64_t TF_ShapeInferenceContextNumInputs(TF_ShapeInferenceContext*);
void TF_ShapeInferenceContextGetInput(TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*);
void TF_ShapeInferenceContextSetOutput(TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*);
TF_KernelBuilder* TF_NewKernelBuilder(const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),
                                      void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*));
void TF_RegisterKernelBuilder(const char* name, TF_KernelBuilder*, TF_Status*);
void TF_OpKernelConstruction_GetAttrInt64(TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction*, TF_Status*);
int TF_NumInputs(TF_OpKernelContext*);
void TF_GetInput(TF_OpKernelContext*, int, TF_Tensor**, TF_Status*);
TF_Tensor* TF_ForwardInputOrAllocateOutput(TF_OpKernelContext*, const int* candidates, int count, int output,
                                           const int64_t* shape, int dimensions, int* forwarded, TF_Status*);
void TF_OpKernelContext_Failure(TF_OpKernelContext*, TF_Status*);

/* The beginning of each area. The counters are on cache lines of their own. */
typedef struct {
  _Atomic int64_t given;  /* blocks whose terms the others may read */
  char between[120];
  _Atomic int64_t summed; /* blocks whose sum they may read */
  char after[120];
} Counters;

/* Asked by number: to open a channel, whether to go on waiting after so many seconds, and told that a wait is over, or
   that a sum has been made that is to be recorded. Returns 0, or 1 for an error, whose text it has written to the
   channel. */
typedef int (*Ask)(int64_t channel, double seconds);
static const double OPEN = -1, OVER = -2, RECORD = -3;

typedef struct {
  int64_t number;
  Ask ask;
  const int* records;   /* whether sums are recorded */
  double marks[4];      /* when the last sum began, had given its terms, had added up, and ended */
  pthread_mutex_t busy;
  bool is_open;
  int ranks, rank;
  size_t item;
  int64_t elements;
  int64_t slots, room;  /* number of blocks of each chunk in an area, and their elements */
  int64_t blocks;       /* since it was opened */
  char** areas;         /* by rank */
  _Atomic int64_t sums, nanoseconds, messages, bytes; /* since it was made */
  char error[2048];
} Channel;

static Channel** channels;
static int64_t channels_made;
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static Channel* channel_of(int64_t number) {
  pthread_mutex_lock(&making);
  Channel* channel = number >= 0 && number < channels_made ? channels[number] : NULL;
  pthread_mutex_unlock(&making);
  return channel;
}

int64_t tfdist_make(Ask ask, const int* records) {
  Channel* channel = calloc(1, sizeof(Channel));
  channel->ask = ask;
  channel->records = records;
  pthread_mutex_init(&channel->busy, NULL);
  pthread_mutex_lock(&making);
  int64_t number = channel->number = channels_made++;
  channels = realloc(channels, sizeof(Channel*) * channels_made);
  channels[number] = channel;
  pthread_mutex_unlock(&making);
  return number;
}

/* Elements of a block, and number of blocks of each chunk for which an area has room. */
enum { BLOCK = 1 << 16, SLOTS = 3 };

static int64_t longest_chunk(int ranks, int64_t elements) { return (elements + ranks - 1) / ranks; }

static int64_t blocks_of(int ranks, int64_t elements) { return (longest_chunk(ranks, elements) + BLOCK - 1) / BLOCK; }

static int64_t slots_of(int ranks, int64_t elements) {
  int64_t blocks = blocks_of(ranks, elements);
  return blocks < SLOTS ? blocks : SLOTS;
}

static int64_t room_of(int ranks, int64_t elements) {
  int64_t longest = longest_chunk(ranks, elements);
  return longest < BLOCK ? longest : BLOCK;
}

int64_t tfdist_area_bytes(int ranks, int64_t elements, int64_t item) {
  return sizeof(Counters) + slots_of(ranks, elements) * ranks * room_of(ranks, elements) * item;
}

/* Called within the channel's request to open it, so by the thread that holds it. */
void tfdist_open(int64_t number, int ranks, int rank, int64_t elements, int64_t item, char* const* areas) {
  Channel* channel = channel_of(number);
  channel->ranks = ranks;
  channel->rank = rank;
  channel->elements = elements;
  channel->item = item;
  channel->slots = slots_of(ranks, elements);
  channel->room = room_of(ranks, elements);
  channel->blocks = 0;
  channel->areas = realloc(channel->areas, sizeof(char*) * ranks);
  memcpy(channel->areas, areas, sizeof(char*) * ranks);
  channel->is_open = true;
}

void tfdist_close(int64_t number) {
  Channel* channel = channel_of(number);
  pthread_mutex_lock(&channel->busy);
  channel->is_open = false;
  pthread_mutex_unlock(&channel->busy);
}

void tfdist_explain(int64_t number, const char* error) {
  Channel* channel = channel_of(number);
  snprintf(channel->error, sizeof(channel->error), "%s", error);
}

void tfdist_marks(int64_t number, double marks[4]) {
  memcpy(marks, channel_of(number)->marks, sizeof(channel_of(number)->marks));
}

void tfdist_totals(int64_t number, int64_t totals[4]) {
  Channel* channel = channel_of(number);
  totals[0] = channel->sums;
  totals[1] = channel->nanoseconds;
  totals[2] = channel->messages;
  totals[3] = channel->bytes;
}

/* Waits, as tfdist/comm/idling.py does: it polls for some time, and then sleeps between polls. It does not poll for
   long where threads compete for cores, which it sees by time in which it did not run. */

static const double SPIN = 2e-3, LOST = 3e-4, CONTENDED = 0.2, ASK = 0.05;
static const double SHORTEST_NAP = 20e-6, LONGEST_NAP = 3e-4, LONGEST_NAP_OF_LONG_WAITS = 5e-3, PART_OF_WAIT = 0.01;
static const int POLLS = 32;
static _Atomic double contended_until;

static double seconds(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static bool wait_for(Channel* channel, _Atomic int64_t* counter, int64_t block) {
  if (atomic_load_explicit(counter, memory_order_acquire) >= block) return true;
  double begun = seconds(CLOCK_MONOTONIC), last = begun, ran = seconds(CLOCK_THREAD_CPUTIME_ID);
  double asked = begun, nap = SHORTEST_NAP;
  bool has_asked = false, goes_on = true;
  while (goes_on) {
    bool is_there = false;
    for (int poll = 0; poll < POLLS && !is_there; poll++) {
      is_there = atomic_load_explicit(counter, memory_order_acquire) >= block;
      if (!is_there) pause_briefly();
    }
    if (is_there) break;
    double now = seconds(CLOCK_MONOTONIC), running = seconds(CLOCK_THREAD_CPUTIME_ID);
    if ((now - last) - (running - ran) > LOST) contended_until = now + CONTENDED;
    if (now - begun < SPIN && now > contended_until) {
      sched_yield();
      last = now;
      ran = running;
      continue;
    }
    if (now - asked > ASK) {
      goes_on = channel->ask(channel->number, now - begun) == 0;
      has_asked = true;
      asked = now;
    }
    struct timespec time = {0, (long)(1e9 * nap)};
    nanosleep(&time, NULL);
    last = seconds(CLOCK_MONOTONIC);
    ran = seconds(CLOCK_THREAD_CPUTIME_ID);
    double longest = PART_OF_WAIT * (last - begun);
    longest = longest < LONGEST_NAP ? LONGEST_NAP : longest;
    longest = longest > LONGEST_NAP_OF_LONG_WAITS ? LONGEST_NAP_OF_LONG_WAITS : longest;
    nap = 2 * nap < longest ? 2 * nap : longest;
  }
  if (has_asked) channel->ask(channel->number, OVER);
  return goes_on;
}

/* Arithmetic, as of tfdist/engine/weights.py and tfdist/collectives/ring.py: rank r adds up chunk r + 1, to which it
   adds its own terms last. A result may be where its own terms are. */

enum { CACHED = 1 << 12 }; /* elements that are added up while they are in the cache */

#define EACH(expression) _Pragma("GCC ivdep") for (int64_t i = 0; i < some; i++) expression

#define ARITHMETIC(T, NAME)                                                                                  \
  static void weigh_##NAME(T* out, const T* in, double weight, int64_t some) {                               \
    T factor = (T)weight;                                                                                    \
    if (weight == 1) memcpy(out, in, some * sizeof(T));                                                      \
    else if (weight == 0) memset(out, 0, some * sizeof(T));                                                  \
    else EACH(out[i] = in[i] * factor);                                                                      \
  }                                                                                                          \
  static void add_##NAME(const Channel* channel, int64_t at, T* result, const T* own, double weight,         \
                         int64_t count) {                                                                    \
    T factor = (T)weight;                                                                                    \
    for (int64_t done = 0; done < count; done += CACHED) {                                                   \
      int64_t some = count - done < CACHED ? count - done : CACHED;                                          \
      T* total = (T*)terms_of(channel, 0) + at + done;                                                       \
      const T* before = (T*)terms_of(channel, 1) + at + done;                                                \
      for (int turn = 2; turn < channel->ranks; turn++) {                                                    \
        const T* next = (T*)terms_of(channel, turn) + at + done;                                             \
        EACH(total[i] = before[i] + next[i]);                                                                \
        before = total;                                                                                      \
      }                                                                                                      \
      const T* mine = own + done;                                                                            \
      T* sum = result + done;                                                                                \
      if (weight == 0) EACH(sum[i] = total[i] = before[i] + (T)0);                                           \
      else EACH(sum[i] = total[i] = before[i] + mine[i] * factor);                                           \
    }                                                                                                        \
  }

/* The area of the rank that comes some turns after this one in the ring. */
static char* area_of(const Channel* channel, int turn) {
  return channel->areas[(channel->rank + turn) % channel->ranks];
}

static char* terms_of(const Channel* channel, int turn) { return area_of(channel, turn) + sizeof(Counters); }

ARITHMETIC(float, floats)
ARITHMETIC(double, doubles)

/* The first element of a chunk, as in tfdist.collectives.schedule.partition. */
static int64_t start_of(const Channel* channel, int chunk) {
  int64_t least = channel->elements / channel->ranks, more = channel->elements % channel->ranks;
  return chunk * least + (chunk < more ? chunk : more);
}

/* Where a block of a chunk is in each area, in elements. */
static int64_t place_of(const Channel* channel, int64_t block, int chunk) {
  int64_t slot = (channel->blocks + block) % channel->slots;
  return (slot * channel->ranks + chunk) * channel->room;
}

/* A tensor, and the memory for its sum. */
typedef struct {
  char *own, *result;
  int64_t elements;
} Piece;

typedef enum { GIVE, ADD, TAKE } Step;

/* Takes a step with one block of a chunk: gives this rank's terms to the others, adds up the sum, or takes the sum of
   the rank that comes some turns after this one. */
static void step(const Channel* channel, Step what, int64_t block, int chunk, int turn, double weight, int count,
                 const Piece* pieces) {
  int64_t begin = start_of(channel, chunk) + block * BLOCK, end = start_of(channel, chunk + 1);
  int64_t place = place_of(channel, block, chunk) - begin;
  int64_t first = 0; /* of a tensor in the vector */
  size_t item = channel->item;
  if (end - begin > BLOCK) end = begin + BLOCK;
  for (const Piece* piece = pieces; piece < pieces + count && first < end; piece++) {
    int64_t last = first + piece->elements;
    int64_t from = begin > first ? begin : first, some = (end < last ? end : last) - from;
    if (some > 0) {
      char* own = piece->own + (from - first) * item;
      char* result = piece->result + (from - first) * item;
      char* shared = terms_of(channel, turn) + (place + from) * item;
      if (what == TAKE) memcpy(result, shared, some * item);
      else if (what == GIVE && item == sizeof(float)) weigh_floats((float*)shared, (float*)own, weight, some);
      else if (what == GIVE) weigh_doubles((double*)shared, (double*)own, weight, some);
      else if (item == sizeof(float)) add_floats(channel, place + from, (float*)result, (float*)own, weight, some);
      else add_doubles(channel, place + from, (double*)result, (double*)own, weight, some);
    }
    first = last;
  }
}

/* Sums; returns whether it has. The caller holds the channel. */
static bool sum(Channel* channel, double weight, int count, const Piece* pieces) {
  int ranks = channel->ranks, own = (channel->rank + 1) % ranks;
  int64_t blocks = blocks_of(ranks, channel->elements);
  Counters* counters = (Counters*)area_of(channel, 0);
  channel->sums++;
  channel->marks[0] = seconds(CLOCK_MONOTONIC);
  for (int64_t given = 0; given < blocks + 2; given++) {
    int64_t added = given - 1, taken = given - 2; /* the blocks of this turn */
    if (given < blocks) {
      for (int turn = 1; turn < ranks; turn++)
        step(channel, GIVE, given, (own + turn) % ranks, 0, weight, count, pieces);
      atomic_store_explicit(&counters->given, channel->blocks + given + 1, memory_order_release);
      channel->marks[1] = seconds(CLOCK_MONOTONIC);
    }
    if (added >= 0 && added < blocks) {
      for (int turn = 1; turn < ranks; turn++)
        if (!wait_for(channel, &((Counters*)area_of(channel, turn))->given, channel->blocks + added + 1)) return false;
      step(channel, ADD, added, own, 0, weight, count, pieces);
      atomic_store_explicit(&counters->summed, channel->blocks + added + 1, memory_order_release);
      channel->marks[2] = seconds(CLOCK_MONOTONIC);
    }
    for (int turn = 1; turn < ranks && taken >= 0; turn++) {
      if (!wait_for(channel, &((Counters*)area_of(channel, turn))->summed, channel->blocks + taken + 1)) return false;
      step(channel, TAKE, taken, (own + turn) % ranks, turn, weight, count, pieces);
    }
  }
  channel->blocks += blocks;
  channel->marks[3] = seconds(CLOCK_MONOTONIC);
  if (*channel->records) channel->ask(channel->number, RECORD);
  return true;
}

/* The kernel. */

static void* create(TF_OpKernelConstruction* context) {
  TF_Status* status = TF_NewStatus();
  int64_t number = -1;
  TF_OpKernelConstruction_GetAttrInt64(context, "channel", &number, status);
  Channel* channel = channel_of(number);
  if (!channel) {
    TF_SetStatus(status, TF_UNKNOWN, "TfdistSum: this graph is of another process, and cannot be run here");
    TF_OpKernelConstruction_Failure(context, status);
  }
  TF_DeleteStatus(status);
  return channel;
}

static void destroy(void* kernel) { (void)kernel; }

static void compute(void* kernel, TF_OpKernelContext* context) {
  Channel* channel = kernel;
  TF_Status* status = TF_NewStatus();
  int count = TF_NumInputs(context) - 2;
  TF_Tensor *inputs[count + 1], *outputs[count];
  memset(inputs, 0, sizeof(inputs));
  memset(outputs, 0, sizeof(outputs));
  Piece pieces[count];
  int64_t elements = 0;
  for (int place = 0; place <= count && TF_GetCode(status) == TF_OK; place++)
    TF_GetInput(context, place, &inputs[place], status);
  for (int place = 0; place < count && TF_GetCode(status) == TF_OK; place++) {
    int dimensions = TF_NumDims(inputs[place]), forwarded;
    int64_t shape[dimensions + 1];
    for (int axis = 0; axis < dimensions; axis++) shape[axis] = TF_Dim(inputs[place], axis);
    outputs[place] = TF_ForwardInputOrAllocateOutput(context, &place, 1, place, shape, dimensions, &forwarded, status);
    if (TF_GetCode(status) != TF_OK) break;
    size_t item = TF_TensorType(inputs[place]) == TF_DOUBLE ? sizeof(double) : sizeof(float);
    pieces[place].own = TF_TensorData(inputs[place]);
    pieces[place].result = TF_TensorData(outputs[place]);
    pieces[place].elements = TF_TensorByteSize(inputs[place]) / item;
    elements += pieces[place].elements;
  }
  if (TF_GetCode(status) == TF_OK) {
    double weight = *(double*)TF_TensorData(inputs[count]);
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV); /* TensorFlow's threads flush subnormal numbers to zero */
    pthread_mutex_lock(&channel->busy);
    double begun = seconds(CLOCK_MONOTONIC);
    bool is_open = channel->is_open || channel->ask(channel->number, OPEN) == 0;
    if (is_open && elements != channel->elements)
      snprintf(channel->error, sizeof(channel->error), "TfdistSum: expected %lld elements, got %lld",
               (long long)channel->elements, (long long)elements);
    else if (is_open && sum(channel, weight, count, pieces)) {
      int64_t others = channel->ranks - 1, own = (channel->rank + 1) % channel->ranks;
      int64_t added_up = start_of(channel, own + 1) - start_of(channel, own);
      channel->error[0] = 0;
      channel->messages += 2 * others;
      channel->bytes += (elements - added_up + others * added_up) * (int64_t)channel->item;
    }
    if (channel->error[0]) {
      channel->is_open = false; /* its counters may be amid a sum */
      TF_SetStatus(status, TF_UNKNOWN, channel->error);
    }
    channel->nanoseconds += (int64_t)(1e9 * (seconds(CLOCK_MONOTONIC) - begun));
    pthread_mutex_unlock(&channel->busy);
    fesetenv(&before);
  }
  if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(context, status);
  for (int place = 0; place <= count; place++) {
    if (inputs[place]) TF_DeleteTensor(inputs[place]);
    if (place < count && outputs[place]) TF_DeleteTensor(outputs[place]);
  }
  TF_DeleteStatus(status);
}

static void infer_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* shape = TF_NewShapeHandle();
  for (int place = 0; place + 2 < TF_ShapeInferenceContextNumInputs(context); place++) {
    TF_ShapeInferenceContextGetInput(context, place, shape, status);
    TF_ShapeInferenceContextSetOutput(context, place, shape, status);
  }
  TF_DeleteShapeHandle(shape);
}

__attribute__((constructor)) static void load(void) {
  TF_Status* status = TF_NewStatus();
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder("TfdistSum");
  TF_OpDefinitionBuilderAddAttr(op, "N: int >= 1");
  TF_OpDefinitionBuilderAddAttr(op, "T: {float, double}");
  TF_OpDefinitionBuilderAddAttr(op, "channel: int");
  TF_OpDefinitionBuilderAddInput(op, "tensors: N * T");
  TF_OpDefinitionBuilderAddInput(op, "weight: double");
  TF_OpDefinitionBuilderAddInput(op, "order: resource"); /* see call_order.py; it is not read */
  TF_OpDefinitionBuilderAddOutput(op, "sums: N * T");
  TF_OpDefinitionBuilderSetIsStateful(op, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, infer_shapes);
  TF_RegisterOpDefinition(op, status);
  TF_RegisterKernelBuilder("TfdistSum", TF_NewKernelBuilder("TfdistSum", "CPU", create, compute, destroy), status);
  TF_DeleteStatus(status);
}
