/* The host shim: the only place where the arguments of a call are checked.
 *
 * __tvm_ffi_main(inputs.., outputs.., workspace, scalars..) checks every argument against the contract,
 * normalises the tensors (full rank, no byte offset, no meaningless stride, no null pointer), fills in the
 * scalars that were left out and calls the program. What it refuses it names in one line:
 *
 *     KERNEL: argument 'NAME': expected WHAT, got WHAT
 *
 * Nothing is written before everything was checked.
 *
 * __tvm_ffi_tlhub_workspace takes the same arguments and answers the bytes of scratch memory that the call needs.
 */
#include "host_shim.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static const tlhub_contract_t *const C = &tlhub_contract;

/* An array of the caller, and what the program gets to see of it. */
typedef struct {
  DLTensor view;
  int64_t shape[TLHUB_MAX_RANK], strides[TLHUB_MAX_RANK];
  intptr_t low, high; /* the bytes from the lowest to past the highest; equal if there are none */
  int32_t missing;    /* 1 if the leading dim was left out */
  int32_t empty;
} array_t;

/* What is known of the extents while the arguments are read. */
typedef struct {
  const int64_t *expected;       /* of a bound function: one value a dim, like tlhub_dim.extent; or NULL */
  int64_t own[TLHUB_MAX_DIMS];   /* by symbol of the contract, -1 if not seen yet */
  int64_t bound[TLHUB_MAX_DIMS]; /* by symbol of the bound problem */
} extents_t;

/* -- messages ---------------------------------------------------------------------------------- */

typedef struct {
  char s[768];
  size_t n;
} text_t;

static void say(text_t *t, const char *format, ...) {
  if (t->n + 1 >= sizeof t->s) return;
  va_list args;
  va_start(args, format);
  int n = vsnprintf(t->s + t->n, sizeof t->s - t->n, format, args);
  va_end(args);
  if (n > 0) t->n = t->n + (size_t)n < sizeof t->s ? t->n + (size_t)n : sizeof t->s - 1;
}

static text_t begin(const char *argument) {
  text_t t;
  t.n = 0;
  t.s[0] = 0;
  say(&t, "%s: argument '%s': expected ", C->kernel, argument);
  return t;
}

static int refuse(const char *kind, const text_t *t) {
  TVMFFIErrorSetRaisedFromCStr(kind, t->s);
  return -1;
}

static void say_list(text_t *t, const int64_t *values, int n) {
  say(t, "(");
  for (int i = 0; i < n; ++i) say(t, i ? ", %lld" : "%lld", (long long)values[i]);
  say(t, n == 1 ? ",)" : ")");
}

static void say_dtype(text_t *t, DLDataType d) {
  static const char *const plain[] = {"int", "uint", "float", "handle", "bfloat", "complex"};
  static const char *const narrow[] = {"e3m4",   "e4m3",       "e4m3b11fnuz", "e4m3fn",
                                       "e4m3fnuz", "e5m2", "e5m2fnuz",    "e8m0fnu"};
  if (d.code == kDLBool) say(t, "bool");
  else if (d.code <= kDLComplex) say(t, "%s%d", plain[d.code], d.bits);
  else if (d.code >= kDLFloat8_e3m4 && d.code <= kDLFloat8_e8m0fnu) say(t, "float8_%s", narrow[d.code - kDLFloat8_e3m4]);
  else say(t, "a dtype of code %d and %d bits", d.code, d.bits);
  if (d.lanes != 1) say(t, " in vectors of %d", d.lanes);
}

static const char *type_name(int32_t index) {
  switch (index) {
    case kTVMFFINone: return "None";
    case kTVMFFIBool: return "a bool";
    case kTVMFFIInt: return "an int";
    case kTVMFFIFloat: return "a float";
    case kTVMFFIDLTensorPtr: case kTVMFFITensor: return "an array";
    case kTVMFFIRawStr: case kTVMFFISmallStr: case kTVMFFIStr: return "a string";
    case kTVMFFIArray: case kTVMFFIList: return "a list";
    case kTVMFFIMap: case kTVMFFIDict: return "a mapping";
    default: return "an object that is no array";
  }
}

static const char *device_name(int32_t type) {
  switch (type) {
    case kDLCPU: case kDLCUDAHost: return "cpu";
    case kDLCUDA: case kDLCUDAManaged: return "cuda";
    case kDLROCM: return "rocm";
    case kDLMetal: return "metal";
    default: return "another device";
  }
}

/* -- extents ----------------------------------------------------------------------------------- */

static int64_t known(const extents_t *e, int dim) {
  int64_t n = C->dims[dim].extent;
  if (n >= 0) return n;
  int64_t over = C->dims[dim].over, whole = C->dims[dim].whole < 0 ? -1 : known(e, C->dims[dim].whole);
  if (whole >= 0) return over ? whole / over + (whole % over != 0) : 1;
  if (e->own[-1 - n] >= 0) return e->own[-1 - n];
  if (!e->expected) return -1;
  n = e->expected[dim];
  return n >= 0 ? n : e->bound[-1 - n];
}

static void learn(extents_t *e, int dim, int64_t value) {
  int64_t n = C->dims[dim].extent;
  if (n < 0) e->own[-1 - n] = value;
  if (e->expected && e->expected[dim] < 0) e->bound[-1 - e->expected[dim]] = value;
}

static int refuse_shape(const tlhub_tensor *want, const extents_t *e, const DLTensor *got) {
  text_t t = begin(want->name);
  int64_t leading = want->elide ? known(e, want->dims[0]) : 0;
  int first = got->ndim != want->ndim && (leading == 1 || (leading < 0 && got->ndim == want->ndim - 1));
  say(&t, "shape (");
  for (int i = first; i < want->ndim; ++i) {
    int64_t n = known(e, want->dims[i]);
    say(&t, i > first ? ", %s" : "%s", C->dims[want->dims[i]].name);
    if (n >= 0) say(&t, "=%lld", (long long)n);
  }
  say(&t, want->ndim - first == 1 ? ",), got " : "), got ");
  say_list(&t, got->shape, got->ndim);
  return refuse("ValueError", &t);
}

/* -- tensors ----------------------------------------------------------------------------------- */

/* A pointer for empty arrays: programs may refuse null, and none reads or writes through it. */
static _Alignas(64) unsigned char nothing[64];

static const DLTensor *tensor(const TVMFFIAny *any) {
  if (any->type_index == kTVMFFITensor) return (const DLTensor *)((const char *)any->v_obj + sizeof(TVMFFIObject));
  if (any->type_index == kTVMFFIDLTensorPtr) return (const DLTensor *)any->v_ptr;
  return NULL;
}

static int on_device(int32_t type) {
  if (C->device_type == kDLCPU) return type == kDLCPU || type == kDLCUDAHost;
  if (C->device_type == kDLCUDA) return type == kDLCUDA || type == kDLCUDAManaged;
  return type == C->device_type;
}

static int read_shape(const tlhub_tensor *want, const DLTensor *got, extents_t *e, array_t *a) {
  a->missing = want->elide && got->ndim == want->ndim - 1;
  if (got->ndim + a->missing != want->ndim) return refuse_shape(want, e, got);
  a->empty = 0;
  for (int i = 0; i < want->ndim; ++i) {
    int64_t n = i < a->missing ? 1 : got->shape[i - a->missing];
    int64_t k = known(e, want->dims[i]);
    if (k >= 0 && k != n) return refuse_shape(want, e, got);
    a->shape[i] = n;
    a->empty |= n == 0;
  }
  /* Two dims of one array may share a symbol: learn them one by one, each checked against the last. */
  for (int i = 0; i < want->ndim; ++i) {
    int64_t k = known(e, want->dims[i]);
    if (k >= 0 && k != a->shape[i]) return refuse_shape(want, e, got);
    learn(e, want->dims[i], a->shape[i]);
  }
  return 0;
}

/* Strides of dims of extent 0 and 1 carry no meaning: they get the value that the program expects. */
static int read_strides(const tlhub_tensor *want, const DLTensor *got, array_t *a) {
  int64_t compact = 1;
  for (int i = want->ndim - 1; i >= 0; --i) {
    int64_t s = compact, need = want->strides[i] == TLHUB_COMPACT ? compact : want->strides[i];
    if (a->shape[i] > 1 && i >= a->missing && got->strides && !a->empty) s = got->strides[i - a->missing];
    else if (need != TLHUB_ANY) s = need;
    if (need != TLHUB_ANY && s != need) {
      text_t t = begin(want->name);
      int wholly = 1;
      for (int k = 0; k < want->ndim; ++k) wholly &= want->strides[k] == TLHUB_COMPACT;
      if (wholly) say(&t, "an array in C order without gaps");
      else say(&t, "stride %lld in dim %s", (long long)need, C->dims[want->dims[i]].name);
      if (got->strides) {
        say(&t, ", got strides ");
        say_list(&t, got->strides, got->ndim);
      } else {
        say(&t, ", got C order without gaps");
      }
      return refuse("ValueError", &t);
    }
    a->strides[i] = s;
    compact = a->shape[i] > 1 ? compact * a->shape[i] : compact;
  }
  return 0;
}

/* An output must not overlap itself: ordered by size, each stride steps over all that the lesser ones span. */
static int writable_once(const tlhub_tensor *want, const array_t *a) {
  int64_t done = 0, span = 0; /* a stride below `done` was looked at; `span` is the reach of those */
  for (;;) {
    int64_t least = INT64_MAX, reach = 0;
    int equal = 0;
    for (int i = 0; i < want->ndim; ++i) {
      int64_t s = a->strides[i] < 0 ? -a->strides[i] : a->strides[i];
      if (a->shape[i] <= 1) continue;
      if (s == 0) return 0;
      if (s <= done || s > least) continue;
      equal = s == least;
      least = s;
      reach = (a->shape[i] - 1) * s;
    }
    if (least == INT64_MAX) return 1;
    if (equal || least <= span) return 0;
    span += reach;
    done = least;
  }
}

static int read_tensor(const tlhub_tensor *want, const TVMFFIAny *any, extents_t *e, array_t *a) {
  const DLTensor *got = tensor(any);
  if (!got) {
    text_t t = begin(want->name);
    say(&t, "an array of ");
    say_dtype(&t, want->dtype);
    say(&t, ", got %s", type_name(any->type_index));
    return refuse("TypeError", &t);
  }
  if (got->dtype.code != want->dtype.code || got->dtype.bits != want->dtype.bits || got->dtype.lanes != 1) {
    text_t t = begin(want->name);
    say(&t, "dtype ");
    say_dtype(&t, want->dtype);
    say(&t, ", got ");
    say_dtype(&t, got->dtype);
    return refuse("TypeError", &t);
  }
  if (!on_device(got->device.device_type)) {
    text_t t = begin(want->name);
    say(&t, "an array on %s, got one on %s", device_name(C->device_type), device_name(got->device.device_type));
    return refuse("ValueError", &t);
  }
  if (read_shape(want, got, e, a) || read_strides(want, got, a)) return -1;

  int64_t item = want->dtype.bits / 8;
  char *data = (char *)got->data + got->byte_offset;
  if (a->empty) data = (char *)nothing;
  if ((uintptr_t)data % (uintptr_t)item) {
    text_t t = begin(want->name);
    say(&t, "data aligned to its item size of %d bytes, got an address that is %d past it", (int)item,
        (int)((uintptr_t)data % (uintptr_t)item));
    return refuse("ValueError", &t);
  }
  a->low = a->high = (intptr_t)data;
  if (!a->empty) {
    for (int i = 0; i < want->ndim; ++i) {
      int64_t reach = (a->shape[i] - 1) * a->strides[i] * item;
      if (reach < 0) a->low += reach;
      else a->high += reach;
    }
    a->high += item;
  }
  if (want->output && !a->empty && !writable_once(want, a)) {
    text_t t = begin(want->name);
    say(&t, "an output whose elements do not share memory, got strides ");
    say_list(&t, a->strides + a->missing, want->ndim - a->missing);
    return refuse("ValueError", &t);
  }
  a->view.data = data;
  a->view.device.device_type = (DLDeviceType)C->device_type;
  a->view.device.device_id = C->device_type == kDLCPU ? 0 : got->device.device_id;
  a->view.ndim = want->ndim;
  a->view.dtype = want->storage;
  a->view.shape = a->shape;
  a->view.strides = a->strides;
  a->view.byte_offset = 0;
  return 0;
}

static int check_together(const array_t *arrays) {
  int n = C->num_inputs + C->num_outputs;
  for (int i = 1; i < n; ++i) {
    if (arrays[i].view.device.device_id != arrays[0].view.device.device_id) {
      text_t t = begin(C->tensors[i].name);
      say(&t, "an array on %s:%d like '%s', got one on %s:%d", device_name(C->device_type),
          arrays[0].view.device.device_id, C->tensors[0].name, device_name(C->device_type),
          arrays[i].view.device.device_id);
      return refuse("ValueError", &t);
    }
  }
  for (int o = C->num_inputs; o < n; ++o) {
    for (int i = 0; i < o; ++i) {
      if (arrays[o].low < arrays[i].high && arrays[i].low < arrays[o].high) {
        text_t t = begin(C->tensors[o].name);
        say(&t, "memory of its own, got memory that overlaps argument '%s'", C->tensors[i].name);
        return refuse("ValueError", &t);
      }
    }
  }
  return 0;
}

/* -- scalars ----------------------------------------------------------------------------------- */

static int read_scalar(const tlhub_scalar *want, const TVMFFIAny *any, const extents_t *e, TVMFFIAny *out) {
  out->zero_padding = 0;
  if (want->kind == TLHUB_INT) {
    out->type_index = kTVMFFIInt;
    if (any->type_index == kTVMFFINone) { out->v_int64 = want->integer; return 0; }
    if (any->type_index == kTVMFFIInt) { out->v_int64 = any->v_int64; return 0; }
  } else {
    out->type_index = kTVMFFIFloat;
    if (any->type_index == kTVMFFIFloat) { out->v_float64 = any->v_float64; return 0; }
    if (any->type_index == kTVMFFIInt) { out->v_float64 = (double)any->v_int64; return 0; }
    if (any->type_index == kTVMFFINone) {
      out->v_float64 = want->number;
      if (want->inverse_sqrt >= 0) {
        int64_t n = known(e, want->inverse_sqrt);
        out->v_float64 = 1.0 / sqrt(n > 0 ? (double)n : 1.0); /* of no elements any scale is right */
      }
      return 0;
    }
  }
  text_t t = begin(want->name);
  say(&t, want->kind == TLHUB_INT ? "an int" : "a float");
  say(&t, ", got %s", type_name(any->type_index));
  return refuse("TypeError", &t);
}

/* -- the call ---------------------------------------------------------------------------------- */

static int refuse_count(int32_t n) {
  text_t t;
  t.n = 0;
  say(&t, "%s: expected %d arguments (", C->kernel, C->num_inputs + C->num_outputs + 1 + C->num_scalars);
  for (int i = 0; i < C->num_inputs + C->num_outputs; ++i) say(&t, "%s, ", C->tensors[i].name);
  say(&t, "workspace");
  for (int i = 0; i < C->num_scalars; ++i) say(&t, ", %s", C->scalars[i].name);
  say(&t, "), got %d", n);
  return refuse("TypeError", &t);
}

/* A call, read and checked but for its scratch memory. */
typedef struct {
  array_t arrays[TLHUB_MAX_TENSORS];
  TVMFFIAny passed[TLHUB_MAX_TENSORS + TLHUB_MAX_SCALARS + 1]; /* to the program */
  int written; /* some output has elements */
} call_t;

static int read_call(const int64_t *expected, const TVMFFIAny *args, int32_t n, call_t *c) {
  extents_t e;
  int tensors = C->num_inputs + C->num_outputs;

  if (n != tensors + 1 + C->num_scalars) return refuse_count(n);
  e.expected = expected;
  for (int i = 0; i < C->num_dims; ++i) e.own[i] = e.bound[i] = -1;
  c->written = 0;
  for (int i = 0; i < tensors; ++i) {
    if (read_tensor(&C->tensors[i], &args[i], &e, &c->arrays[i])) return -1;
    c->passed[i].type_index = kTVMFFIDLTensorPtr;
    c->passed[i].zero_padding = 0;
    c->passed[i].v_ptr = &c->arrays[i].view;
    if (i >= C->num_inputs) c->written |= !c->arrays[i].empty;
  }
  if (tensors && check_together(c->arrays)) return -1;
  if (!C->workspace && args[tensors].type_index != kTVMFFINone) {
    text_t t = begin("workspace");
    say(&t, "None, for this kernel needs no workspace, got %s", type_name(args[tensors].type_index));
    return refuse("TypeError", &t);
  }
  for (int i = 0; i < C->num_scalars; ++i) {
    if (read_scalar(&C->scalars[i], &args[tensors + 1 + i], &e, &c->passed[tensors + i])) return -1;
  }
  return 0;
}

static text_t begin_workspace(const call_t *c, int64_t need) {
  text_t t = begin("workspace");
  say(&t, "an array on %s:%d of at least %lld bytes without gaps, aligned to %d", device_name(C->device_type),
      c->arrays[0].view.device.device_id, (long long)need, TLHUB_WORKSPACE_ALIGNMENT);
  return t;
}

/* The scratch memory: any array without gaps that is large enough, for nothing is read from it. */
static int read_workspace(const TVMFFIAny *any, call_t *c) {
  int tensors = C->num_inputs + C->num_outputs;
  const DLTensor *got = tensor(any);
  int64_t need, size = 1;
  if (C->workspace(c->passed, &need)) return -1;
  TVMFFIAny *passed = &c->passed[tensors + C->num_scalars];
  passed->type_index = kTVMFFIOpaquePtr;
  passed->zero_padding = 0;
  passed->v_ptr = NULL;
  if (!got && (need || any->type_index != kTVMFFINone)) {
    text_t t = begin_workspace(c, need);
    say(&t, ", got %s", type_name(any->type_index));
    return refuse("TypeError", &t);
  }
  if (!need) return 0;
  if (!on_device(got->device.device_type) || got->device.device_id != c->arrays[0].view.device.device_id) {
    text_t t = begin_workspace(c, need);
    say(&t, ", got one on %s:%d", device_name(got->device.device_type), got->device.device_id);
    return refuse("ValueError", &t);
  }
  for (int i = got->ndim - 1; i >= 0; --i) {
    if (got->strides && got->shape[i] != 1 && got->strides[i] != size) {
      text_t t = begin_workspace(c, need);
      say(&t, ", got strides ");
      say_list(&t, got->strides, got->ndim);
      return refuse("ValueError", &t);
    }
    size *= got->shape[i];
  }
  size = size * got->dtype.bits * got->dtype.lanes / 8;
  char *data = (char *)got->data + got->byte_offset;
  if (size < need || (uintptr_t)data % TLHUB_WORKSPACE_ALIGNMENT) {
    text_t t = begin_workspace(c, need);
    say(&t, ", got %lld bytes at an address that is %d past it", (long long)size,
        (int)((uintptr_t)data % TLHUB_WORKSPACE_ALIGNMENT));
    return refuse("ValueError", &t);
  }
  for (int i = 0; i < tensors; ++i) {
    if ((intptr_t)data < c->arrays[i].high && c->arrays[i].low < (intptr_t)data + need) {
      text_t t = begin("workspace");
      say(&t, "memory of its own, got memory that overlaps argument '%s'", C->tensors[i].name);
      return refuse("ValueError", &t);
    }
  }
  passed->v_ptr = data;
  return 0;
}

static int call(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  call_t c;
  int tensors = C->num_inputs + C->num_outputs;
  if (read_call((const int64_t *)self, args, n, &c)) return -1;
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  if (!c.written) return 0;
  if (C->workspace && read_workspace(&args[tensors], &c)) return -1;
  return C->program(NULL, c.passed, tensors + C->num_scalars + (C->workspace != NULL), result);
}

EXPORT int __tvm_ffi_main(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  (void)self;
  return call(NULL, args, n, result);
}

EXPORT int __tvm_ffi_tlhub_workspace(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  (void)self;
  call_t c;
  int64_t bytes = 0;
  if (read_call(NULL, args, n, &c)) return -1;
  if (c.written && C->workspace && C->workspace(c.passed, &bytes)) return -1;
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = bytes;
  return 0;
}

/* bind(one integer a dim): a function that serves these extents only. An integer of at least 0 is that
 * extent; -1 - k is symbol number k, and equal symbols stand for equal extents. */
EXPORT int __tvm_ffi_tlhub_bind(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  (void)self;
  text_t t;
  t.n = 0;
  if (n != C->num_dims) {
    say(&t, "%s: bind expected %d dims, got %d", C->kernel, C->num_dims, n);
    return refuse("TypeError", &t);
  }
  int64_t *expected = (int64_t *)malloc(sizeof(int64_t) * (size_t)(n ? n : 1));
  if (!expected) {
    say(&t, "%s: out of memory", C->kernel);
    return refuse("MemoryError", &t);
  }
  for (int i = 0; i < n; ++i) {
    int64_t v = args[i].v_int64, own = C->dims[i].extent;
    if (args[i].type_index != kTVMFFIInt || v < -n || (own >= 0 && v != own)) {
      free(expected);
      say(&t, "%s: this binary cannot serve the extent asked for in dim %s", C->kernel, C->dims[i].name);
      return refuse("ValueError", &t);
    }
    expected[i] = v;
  }
  TVMFFIObjectHandle function = NULL;
  if (TVMFFIFunctionCreate(expected, call, free, &function)) {
    free(expected);
    return -1;
  }
  result->type_index = kTVMFFIFunction;
  result->zero_padding = 0;
  result->v_obj = (TVMFFIObject *)function;
  return 0;
}
